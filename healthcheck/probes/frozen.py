"""What an optimizer holds and how: nothing that is trainable, normalisation that goes on in what is frozen, one memory as two
parameters, tensors that were frozen in mid-training and are updated all the same."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.probes.labels import first_few, optimizer_labels, where_in_model, where_made
from healthcheck.probes.looks import LOOK_SELDOM, Lead, next_look

LOOKS = 20
"""Looks in a run: who unfreezes later does so in its first part."""
REST = 50
"""Steps between two looks for another optimizer."""
_FROZEN, _NORMS = "optimizer.all_frozen", "modules.frozen_norms"


class FrozenProbe:
    """Looks for updates that can change nothing, and for frozen layers that change without one.

    *All frozen*: tensors of the optimizers that step, where not one of them requires gradients or has one. One
    optimizer of several may wait with frozen tensors until its part is thawed; all of them train nothing. *Frozen norms*:
    normalisation layers whose own parameters are frozen, that stand in train mode and whose running statistics moved
    since the look before, in a model that trains other tensors. That may be meant so: statistics are adapted to new data.
    """

    name = "frozen"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _FROZEN,
            "Tensors of the optimizers that step, if all of them are frozen (requires_grad=False, no gradient); else 0.",
            cost=Cost.HOST,
        ),
        Metric(
            _NORMS,
            "Normalisation layers with frozen parameters whose running statistics move, while other parts train.",
            cost=Cost.HOST,
            needs=("frozen normalisation layers",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._lead = Lead()
        self._looks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Looks at each optimizer: a second training has another one."""
        self._before: dict[int, tuple[Any, int]] = {}
        """Frozen layers, and how often their statistics had been written."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or not self._lead.of(event):
            return ()
        looks = self._looks.get(event.optimizer, 0)
        if looks >= LOOKS:
            self.rests_until = next_look(event.step, REST, LOOK_SELDOM)
            return ()
        frozen, norms = demand.due(_FROZEN, event.step), demand.due(_NORMS, event.step)
        if not frozen and not norms:
            return ()
        self._looks[event.optimizer] = looks + 1
        samples = []
        if frozen:
            samples.append(self._all_frozen(event))
        if norms:
            samples += self._moving_norms(event)
        return samples

    def _all_frozen(self, event: Event) -> Sample:
        assert event.model is not None
        # Those before it in the process have ended their training.
        living = list(event.model.optimizers())[event.optimizer_index :]
        optimizers = {id(o): o for o in (*living, event.optimizer)}.values()
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        nothing = not any(p.requires_grad or p.grad is not None for p in held)
        names = {id(p): name for name, p in event.model.named_parameters()} if nothing else {}
        place = where_made(event, event.optimizer)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(names.get(id(p), "?") for p in held)} | place

        return Sample(_FROZEN, event.step, float(len(held) * nothing), detail=facts if nothing else None)

    def _moving_norms(self, event: Event) -> Iterable[Sample]:
        from torch.nn.modules.batchnorm import _NormBase

        assert event.model is not None
        modules = event.model.named_modules()
        frozen = [
            (name, m)
            for name, m in modules
            if isinstance(m, _NormBase) and m.num_batches_tracked is not None and _is_frozen(m)
        ]
        before = self._before
        self._before = {id(m): (weak(m), m.num_batches_tracked._version) for _, m in frozen}
        if not frozen or not before:
            return
        moved = []
        for name, module in frozen:
            known, version = before.get(id(module), (None, -1))
            if (
                known is not None
                and known() is module
                and module.training
                and module.num_batches_tracked._version != version
            ):
                moved.append(name)
        place = where_in_model(event, moved)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(moved), "layers": f"{len(moved):,} of {len(frozen):,} frozen ones"} | place

        yield Sample(_NORMS, event.step, float(len(moved)), detail=facts if moved else None)


def _is_frozen(norm: Any) -> bool:
    """Whether it has parameters, all frozen. A layer without any was not frozen by anybody."""
    own = list(norm.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


ZERO_LOOKS = (10, 20)
"""Updates at which weights are compared with zero: by then a factor that was zero at first has moved."""


class ZeroFactorProbe:
    """Counts weight matrices that are all zero and get a gradient of zero, at two updates.

    Of two factors one may begin with zeros (the second one of LoRA, the last layer of a branch): it gets a gradient from the
    other. Where both are zero, each keeps the gradient of the other at zero, for good.
    """

    name = "zero-factors"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "params.zero_for_good",
            "Trained weight matrices that are all zero and whose gradients are all zero.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = ZERO_LOOKS[0]
        self._seen: dict[int, int] = {}
        """Looks at each optimizer."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        looks = self._seen.get(event.optimizer_index, 0)
        if event.optimizer is None:
            return ()
        self.rests_until = ZERO_LOOKS[looks] if looks < len(ZERO_LOOKS) else sys.maxsize
        if self.rests_until > event.step:
            return ()
        self._seen[event.optimizer_index] = looks + 1
        held = [p for group in event.optimizer.param_groups for p in group["params"] if _is_matrix(p)]
        if not held:
            return ()
        import torch

        still = torch._foreach_norm(held, float("inf")), torch._foreach_norm([p.grad for p in held], float("inf"))
        zero = [((weight == 0) & (gradient == 0)).to(held[0].device) for weight, gradient in zip(*still, strict=True)]
        names = {id(p): name for name, p in event.model.named_parameters()} if event.model is not None else {}

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(names.get(id(p), "?") for p, hit in zip(held, zero, strict=True) if bool(hit))}

        count = number(torch.stack(zero).sum())
        return (
            Sample("params.zero_for_good", event.step, count, optimizer_labels(event.optimizer_index), detail=facts),
        )


def _is_matrix(parameter: Any) -> bool:
    """Weights of two dimensions or more that have a gradient. Shards are left alone: one may be empty or padded."""
    gradient = parameter.grad
    return (
        gradient is not None
        and parameter.dim() > 1
        and parameter.numel() > 0
        and gradient.layout is parameter.layout
        and not hasattr(parameter, "_local_tensor")
        and parameter.is_floating_point()
    )


# --------------------------------------------------------------------------------------------------
# What an optimizer holds: one memory as two parameters, tensors that were frozen in mid-training and are updated all the same.


HELD_LOOKS = 2
"""Looks at each optimizer for memory that it holds twice."""
_SHARED, _MOVED = "params.shared_memory", "params.frozen_moved"


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
        if looked >= HELD_LOOKS:
            self.rests_until = next_look(event.step, REST, LOOK_SELDOM)  # a second training has another one
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
            _MOVED,
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
        if optimizer is None or not demand.due(_MOVED, event.step):
            return ()
        if not type(optimizer).__module__.startswith("torch.optim."):
            return ()
        found = []
        trained = self._trained.setdefault(optimizer, set())
        for group in optimizer.param_groups:
            trained.update([id(p) for p in group["params"] if p.requires_grad])
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
                _MOVED,
                event.step,
                float(len(found)),
                optimizer_labels(event.optimizer_index),
                detail=facts if found else None,
            ),
        )
