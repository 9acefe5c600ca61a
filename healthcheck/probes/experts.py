"""Experts that a router leaves out, in a mixture of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import largest, number, value_of
from healthcheck.probes.labels import where_in_model
from healthcheck.probes.looks import PAUSE
from healthcheck.probes.traits import routed_experts

_KEY = "experts.idle"
LOOKS = 10
"""Looks in a row at which an expert had no gradient until it counts as idle."""
FEWEST = 3
"""Experts of a layer: of two, one may well do the work of both for a while."""


class ExpertProbe:
    """Looks at which experts of each layer get a gradient: those that were sent a token.

    A router that sends most tokens to a few experts trains these alone, which makes it send them more: it feeds itself
    (Shazeer et al., 2017). Experts are the parts of a module named ``experts`` that stands beside a ``router`` or a
    ``gate``, or rows of its tensors where all of them are in one. Experts whose weights are sharded over ranks or frozen
    are not judged.
    """

    name = "experts"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            f"Part of a layer's experts that got no gradient at the last {LOOKS} looks: of the layer with the largest.",
            "fraction",
            Cost.DEVICE,
            needs=("a router with experts",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._used: dict[str, deque[Any]] = {}
        """For each layer and look, which experts had a gradient: boolean tensors (experts)."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or not demand.due(_KEY, event.step):
            return ()
        layers = routed_experts(event.model)
        if not layers:
            self.rests_until = event.step + PAUSE
            return ()
        found: list[tuple[str, Any]] = []
        for name, experts in layers:
            used = _used(experts)
            if used is None:
                continue
            looks = self._used.setdefault(name, deque(maxlen=LOOKS))
            if looks and looks[0].shape != used.shape:
                looks.clear()
            looks.append(used)
            if len(looks) == LOOKS:
                found.append((name, _idle(looks)))
        if not found:
            return ()

        def facts() -> Mapping[str, Any]:
            share, name = max((value_of(number(share)) or 0.0, name) for name, share in found)
            if not share:
                return {}
            return {"layer": name, "experts": len(self._used[name][-1])} | where_in_model(event, [name])

        value = largest([number(share) for _, share in found])
        return (Sample(_KEY, event.step, value, detail=facts),)


def _idle(looks: Iterable[Any]) -> Any:
    """Part of the experts that no look found in use; 0 where none is, since then it is no matter of the router."""
    import torch

    used = torch.stack(tuple(looks)).any(dim=0)
    return torch.where(used.any(), (~used).float().mean(), 0.0)


def _used(experts: Any) -> Any:
    """Which of a layer's experts have a gradient that is not 0, as a boolean tensor; None where that cannot be seen."""
    import torch

    children = list(experts.children())
    if len(children) == 1 and not list(experts.parameters(recurse=False)):
        children = list(children[0].children())  # Megatron: ``experts.local_experts``
    if len(children) >= FEWEST:
        trained = [[p for p in child.parameters() if p.requires_grad] for child in children]
        if not all(trained):
            return None
        gradients = [[p.grad for p in own if p.grad is not None] for own in trained]
        there = [own[0] for own in gradients if own]
        if not there or any(type(g) is not torch.Tensor or g.is_sparse for g in there):
            return None
        norms = iter(torch._foreach_norm(there))
        return torch.stack([next(norms) if own else there[0].new_zeros(()) for own in gradients]) != 0
    rows = [p for p in experts.parameters() if p.requires_grad and p.dim() >= 3 and p.shape[0] >= FEWEST]
    if not rows or type(rows[0].grad) is not torch.Tensor:
        return None
    return rows[0].grad.flatten(1).abs().amax(dim=1) != 0
