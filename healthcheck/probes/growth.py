"""How large the weights are, against what they were before the first update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.sampling import ElementSampler
from healthcheck.probes.values import on_host, optimizer_labels, scalar, spread, weak
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

TENSORS = 16
"""Tensors looked at, spread over the optimizer's."""


@dataclass(slots=True)
class _Start:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    size: Any
    """Root of the sum of squares at the first look, 0-dim."""


class WeightGrowthProbe:
    """Compares the size of sampled weights with their size at the optimizer's first update.

    Matrices only, where there are any: gains and biases often start at 0 or 1 and may go far from it. A few numbers
    per look; what is remembered of the start is one.
    """

    name = "weight-growth"
    stretchable = ("params.growth",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("params.growth", "|W| divided by |W| before the optimizer's first update.", cost=Cost.DEVICE),
    )

    def __init__(self) -> None:
        self._starts: dict[int, _Start] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None or not demand.wants("params.growth"):
            return ()
        start = self._starts.get(event.optimizer_index)
        if start is None or start.optimizer() is not event.optimizer:
            # An optimizer that is gone takes its parameters along: they must not live on because we looked at them.
            self._starts = {index: known for index, known in self._starts.items() if known.optimizer() is not None}
            sampler = ElementSampler(looked_at(event.optimizer))
            if sampler.groups:
                self._starts[event.optimizer_index] = _Start(weak(event.optimizer), sampler, _size(sampler))
            return ()
        if not demand.due("params.growth", event.step):
            return ()
        size = _size(start.sampler)
        if on_host(size) and not float(start.size):
            return ()
        first = start.size

        def facts() -> Mapping[str, Any]:
            return {
                "size": f"rms of the weights looked at {float(size):.3g}, {float(first):.3g} before the first update"
            }

        labels = optimizer_labels(event.optimizer_index)
        return (Sample("params.growth", event.step, scalar(size / first), labels, detail=facts),)


def looked_at(optimizer: Any) -> list[Any]:
    """At most :data:`TENSORS` trainable weights of an optimizer: matrices, where it has any."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    matrices = [p for p in params if p.dim() > 1] or params
    return list(spread(matrices, TENSORS))


def _size(sampler: ElementSampler) -> Any:
    """Root mean square over the tensors looked at, each weighed by what its elements stand for."""
    import torch

    squares, counts = [], 0.0
    for rows in sampler.weights():
        stands_for = sampler.sizes(rows.indices)
        weights = torch.tensor(stands_for, dtype=rows.values.dtype).to(rows.values.device, non_blocking=True)
        squares.append((rows.values.square().sum(1) * weights).sum())
        counts += sum(int(sampler.params[i].numel()) for i in rows.indices)
    home = squares[0].device
    total = squares[0] if len(squares) == 1 else torch.stack([s.to(home, torch.float32) for s in squares]).sum()
    return (total / max(counts, 1.0)).sqrt()
