"""What is frozen and should not be, or is not quite: optimizers without a trainable tensor, normalisation that goes on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.probes.labels import first_few, optimizer_labels, where_in_model, where_made
from healthcheck.probes.looks import Lead, next_look

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
            self.rests_until = next_look(event.step, REST)
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
        if event.optimizer is None or looks >= len(ZERO_LOOKS) or event.step < ZERO_LOOKS[looks]:
            return ()
        self._seen[event.optimizer_index] = looks + 1
        if all(n >= len(ZERO_LOOKS) for n in self._seen.values()):
            self.rests_until = sys.maxsize
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
