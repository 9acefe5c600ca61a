"""How large the weights are, against what they were before the first update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.transfer.late import Late, LateTable
from healthcheck.probes.values import on_host, optimizer_labels, scalar, spread
from healthcheck.probes.weights.sampling import ElementSampler
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Labels, Metric, Sample

TENSORS = 16
"""Tensors looked at, spread over the optimizer's."""
TINY = 0.3
"""Part of the usual size below which weights were made small on purpose."""


@dataclass(slots=True)
class _Start:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    size: Any
    """Root mean square at the first look: 0-dim, or a :class:`Late`."""
    usual: float
    """What torch's own initial values would have; 0 where there is no matrix."""


class WeightGrowthProbe:
    """Compares the size of sampled weights with their size at the optimizer's first update.

    Matrices only, where there are any: gains and biases often start at 0 or 1 and may go far from it. A few numbers
    per look; what is remembered of the start is one. Weights that begin far below the usual size, 1 / sqrt(3 fan-in)
    (He et al., 2015, as ``nn.Linear`` has it), are meant to grow up to it: that is no growth yet.
    """

    name = "weight-growth"
    stretchable = ("params.growth",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "params.growth",
            "|W| divided by |W| before the optimizer's first update, or by its usual size where it began far below that.",
            cost=Cost.DEVICE,
        ),
        Metric(
            "init.size",
            "|W| before the first update divided by the usual size, 1 / sqrt(3 fan-in); 1 where there is no matrix.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._starts: dict[int, _Start] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None:
            return ()
        self.rests_until = demand.next_due(("params.growth",), event.step)
        start = self._starts.get(event.optimizer_index)
        if start is None or start.optimizer() is not event.optimizer:
            # An optimizer that is gone takes its parameters along: they must not live on because we looked at them.
            self._starts = {index: known for index, known in self._starts.items() if known.optimizer() is not None}
            sampler = ElementSampler(looked_at(event.optimizer))
            if sampler.groups:
                start = _Start(weak(event.optimizer), sampler, _size(sampler), _usual(sampler.params))
                self._starts[event.optimizer_index] = start
                if event.optimizer_index == 0 and demand.wants("init.size"):
                    return (Sample("init.size", event.step, _initial(start)),)
            return ()
        if not demand.due("params.growth", event.step):
            return ()
        labels, step = optimizer_labels(event.optimizer_index), event.step
        size = _size(start.sampler)
        if isinstance(size, Late):
            return (_late_growth(size, start, step, labels),)
        if on_host(size) and not float(start.size):
            return ()
        first = start.size
        facts = lambda: _facts(float(size), float(first))  # noqa: E731
        tiny = (first < TINY * start.usual) & (size > first)
        grown = (size / start.usual).clamp(min=1.0).where(tiny, size / first) if start.usual else size / first
        return (Sample("params.growth", step, scalar(grown), labels, detail=facts),)


def _usual(params: Sequence[Any]) -> float:
    """Root mean square that ``nn.Linear`` would give weights of these shapes."""
    if any(p.dim() < 2 for p in params):
        return 0.0
    return math.sqrt(sum(int(p.shape[0]) for p in params) / (3 * sum(int(p.numel()) for p in params)))


def _initial(start: _Start) -> Any:
    usual = start.usual
    if not usual:
        return 1.0
    if isinstance(start.size, Late):
        size = start.size
        return Late(lambda *tables: size.finish(list(tables)) / usual, *size.parts)
    return scalar(start.size / usual)


def _late_growth(size: Late, start: _Start, step: int, labels: Labels) -> Sample:
    """The same on the host, when the sums of both have arrived."""
    first, usual = start.size, start.usual
    numbers: list[float] = []
    count = len(size.parts)

    def compute(*tables: Sequence[float]) -> float:
        now, then = size.finish(list(tables[:count])), first.finish(list(tables[count:]))
        numbers[:] = [now, then]
        if 0.0 < then < TINY * usual and now > then:
            return max(1.0, now / usual)
        return now / then if then else math.nan

    facts = lambda: _facts(*numbers) if numbers else {}  # noqa: E731
    return Sample("params.growth", step, Late(compute, *size.parts, *first.parts), labels, detail=facts)


def _facts(size: float, first: float) -> Mapping[str, Any]:
    return {"size": f"rms of the weights looked at {size:.3g}, {first:.3g} before the first update"}


def looked_at(optimizer: Any) -> list[Any]:
    """At most :data:`TENSORS` trainable weights of an optimizer: matrices, where it has any."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    matrices = [p for p in params if p.dim() > 1] or params
    return list(spread(matrices, TENSORS))


def _size(sampler: ElementSampler) -> Any:
    """Root mean square over the tensors looked at, each weighed by what its elements stand for.

    A 0-dim tensor, or a :class:`Late` of one table a group where the device has summed up the elements.
    """
    import torch

    count = sum(int(sampler.params[i].numel()) for group in sampler.groups for i in group)
    vectors = sampler.squares()
    if vectors is not None:
        sizes = [sampler.sizes(group) for group in sampler.groups]

        def compute(*tables: Sequence[float]) -> float:
            total = sum(sum(map(mul, numbers, weights)) for numbers, weights in zip(tables, sizes, strict=True))
            return math.sqrt(total / max(count, 1))

        return Late(compute, *(LateTable(vector) for vector in vectors))
    squares = []
    for rows in sampler.weights():
        weights = torch.tensor(sampler.sizes(rows.indices), dtype=rows.values.dtype)
        squares.append((rows.values.square().sum(1) * weights.to(rows.values.device, non_blocking=True)).sum())
    home = squares[0].device
    total = squares[0] if len(squares) == 1 else torch.stack([s.to(home, torch.float32) for s in squares]).sum()
    return (total / max(count, 1)).sqrt()
