"""What an optimizer holds and how: one memory as two parameters, tensors that were frozen in mid-training and are updated all the
same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.probes.labels import first_few, optimizer_labels, where_made

LOOKS = 2
"""Looks at each optimizer for memory that it holds twice."""
_SHARED, _FROZEN = "params.shared_memory", "params.frozen_moved"


class SharedMemoryProbe:
    """Counts parameters that lie in the memory of another one that is held too.

    ``out.weight = nn.Parameter(embedding.weight)`` and ``out.weight.data = embedding.weight.data`` tie no weights: each of the two
    parameters has a gradient and moments of its own, and both are applied to the same numbers.
    """

    name = "shared-memory"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(_SHARED, "Parameters in optimizers whose memory is that of another one.", cost=Cost.HOST),
    )

    def __init__(self) -> None:
        self.rests_until = 2
        self._looked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or event.step < 2:
            return ()
        looked = self._looked.get(event.optimizer, 0)
        if looked >= LOOKS:
            self.rests_until = event.step - event.step % 50 + 50  # a second training has another one
            return ()
        self._looked[event.optimizer] = looked + 1
        optimizers = {id(o): o for o in (*event.model.optimizers(), event.optimizer)}.values()
        places: dict[tuple[int, int], Any] = {}
        twice: list[tuple[Any, Any]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if not _has_memory(p):
                        continue
                    known = places.setdefault((p.data_ptr(), p.numel()), p)
                    if known is not p:
                        twice.append((known, p))
        names = {id(p): name for name, p in event.model.named_parameters()} if twice else {}
        place = where_made(event, event.optimizer) if twice else {}

        def facts() -> Mapping[str, Any]:
            pairs = (f"{names.get(id(one), '?')} and {names.get(id(other), '?')}" for one, other in twice)
            return {"which": first_few(pairs)} | place

        return (
            Sample(
                _SHARED,
                event.step,
                float(len(twice)),
                optimizer_labels(event.optimizer_index),
                detail=facts if twice else None,
            ),
        )


def _has_memory(parameter: Any) -> bool:
    """Plain tensors of more than one value. Shards and tensors of other kinds have ways of their own to lie in memory."""
    return (
        parameter.numel() > 1
        and type(parameter).__name__ == "Parameter"
        and not hasattr(parameter, "_local_tensor")
        and parameter.layout.__str__() == "torch.strided"
        and parameter.data_ptr() != 0
    )


class FrozenMovedProbe:
    """Counts tensors that were frozen after their optimizer had trained them, and that it goes on moving.

    Torch's optimizers pass over tensors without a gradient, and not over those with ``requires_grad=False``: a gradient of zeros, as
    ``zero_grad(set_to_none=False)`` leaves it, is an update by momentum, moments and weight decay.
    """

    name = "frozen-moved"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _FROZEN,
            "Frozen tensors that their optimizer trained before, and goes on moving by momentum, moments or weight decay.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._trained: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        """Tensors of each optimizer that required gradients at a look, by id. Master weights in another precision never do, and
        get theirs by hand."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if optimizer is None or not demand.due(_FROZEN, event.step):
            return ()
        if not type(optimizer).__module__.startswith("torch.optim."):
            return ()
        found = []
        trained = self._trained.setdefault(optimizer, set())
        for group in optimizer.param_groups:
            trained.update(id(p) for p in group["params"] if p.requires_grad)
            if not group.get("lr"):
                continue
            decays = bool(group.get("weight_decay"))
            for p in group["params"]:
                if p.requires_grad or p.grad is None or id(p) not in trained:
                    continue
                # Only who has had an update has a state: what was frozen from the start has none, and no gradient either.
                state = optimizer.state.get(p) or {}
                if any(hasattr(value, "shape") and value.dim() for value in state.values()) or (decays and state):
                    found.append(p)
        names = {id(p): n for n, p in event.model.named_parameters()} if found and event.model is not None else {}
        place = where_made(event, optimizer) if found else {}

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(names.get(id(p), "?") for p in found)} | place

        return (
            Sample(
                _FROZEN,
                event.step,
                float(len(found)),
                optimizer_labels(event.optimizer_index),
                detail=facts if found else None,
            ),
        )
