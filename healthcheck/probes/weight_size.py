"""How large the weights are: before the first update (rows that are all alike, layers that blow their input up), and since.

Methods: symmetry breaking as in Goodfellow, Bengio, Courville (2016), 8.4; gain of a layer against its fan-in as in
Glorot and Bengio (2010) and He et al. (2015).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, count, largest, numbers, value_of, values_of
from healthcheck.device.sampling import ElementSampler
from healthcheck.device.tensors import evenly, local_part
from healthcheck.probes.labels import first_few, optimizer_labels

ROWS = 8
"""Rows of a matrix that are compared, and from which its spread is taken."""

Named = Sequence[tuple[str, Any]]


class InitialWeightProbe:
    """Looks once, before the first update, at the trainable weight matrices of linear and convolution layers.

    *Alike*: all rows are the same and not zero. Units that start alike get the same gradient and stay alike, if the
    layer behind them treats them alike too: two such layers are a fault, one is none. *Gain*: standard deviation times
    the root of the fan-in, by which a layer multiplies the size of its input; 0.5 to 1.5 is usual. Weights that are
    shared with an embedding are left out, as are frozen and zero ones (adapters begin at zero).
    """

    name = "initial-weights"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("init.alike", "Weight matrices whose rows all begin as the same vector.", cost=Cost.DEVICE),
        Metric("init.gain", "Largest standard deviation times root of the fan-in, over the layers.", cost=Cost.DEVICE),
        Metric("init.gain_ratio", "Largest gain of a layer divided by the smallest.", cost=Cost.DEVICE),
    )

    def __init__(self) -> None:
        self._looked = False
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._looked or event.model is None:
            return ()
        self._looked = True
        self.rests_until = sys.maxsize
        if event.step > 1:  # a run that goes on has no beginning
            return ()
        layers = _layers(event.model.named_modules())
        return list(self._samples(event.step, layers)) if layers else ()

    def _samples(self, step: int, layers: Named) -> Iterable[Sample]:
        import torch

        names = [name for name, _ in layers]
        looks = [_look(weight) for _, weight in layers]
        home = looks[0][0].device
        alike = numbers(torch.stack([same.to(home) for same, _ in looks]))
        gains = numbers(torch.stack([gain.to(home) for _, gain in looks]))

        def which() -> Mapping[str, Any]:
            return {"which": first_few(n for n, flag in zip(names, values_of(alike), strict=True) if flag)}

        def widest() -> Mapping[str, Any]:
            values = values_of(gains)
            worst = max(range(len(values)), key=values.__getitem__)
            return {"which": f"{names[worst]}, gain {values[worst]:.3g}; median {sorted(values)[len(values) // 2]:.3g}"}

        yield Sample("init.alike", step, count(alike), detail=which)
        yield Sample("init.gain", step, largest(gains), detail=widest)
        ratio = calculate(_gain_ratio, gains)
        if ratio is not None:
            yield Sample("init.gain_ratio", step, ratio, detail=widest)


def _gain_ratio(gains: Sequence[float]) -> float | None:
    """The largest gain against the smallest that is not zero; None without one."""
    narrowest = min((gain for gain in gains if gain > 0), default=math.inf)
    return float(largest(gains)) / narrowest if math.isfinite(narrowest) else None


def _layers(modules: Named) -> list[tuple[str, Any]]:
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    # A head that is tied to its embedding has the embedding's initial values, not a layer's.
    embedded = {id(m.weight) for _, m in modules if isinstance(m, nn.Embedding)}
    found = []
    for name, module in modules:
        if not isinstance(module, (nn.Linear, _ConvNd)):
            continue
        weight = getattr(module, "weight", None)
        if weight is None or not weight.requires_grad or id(weight) in embedded or weight.device.type == "meta":
            continue
        local = local_part(weight)
        # Depthwise kernels may well be alike: each has a channel of its own.
        if local.dim() > 1 and local.shape[0] > 1 and local[0].numel() > 1 and local.is_floating_point():
            found.append((name or "model", local))
    return found


def _look(weight: Any) -> tuple[Any, Any]:
    """Whether all rows are alike and not zero, and the gain: two 0-dim tensors on the weight's device."""
    rows = weight.reshape(weight.shape[0], -1)
    rows = rows[:: max(1, rows.shape[0] // ROWS)].float()
    alike = (rows == rows[0]).all() & (rows[0] != 0).any()
    gain = (rows.var() * rows.shape[1]).sqrt() if rows.numel() > 1 else rows.new_zeros(())
    return alike, gain


TENSORS = 16
"""Tensors looked at, spread over the optimizer's."""
TINY = 0.3
"""Part of the usual size below which weights were made small on purpose."""


@dataclass(slots=True)
class _Start:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    size: Any
    """Root mean square at the first look."""
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
                    size = start.size / start.usual if start.usual else 1.0
                    return (Sample("init.size", event.step, size),)
            return ()
        if not demand.due("params.growth", event.step):
            return ()
        labels, step = optimizer_labels(event.optimizer_index), event.step
        size, first = _size(start.sampler), start.size
        growth = calculate(partial(_growth, start.usual), size, first)

        def facts() -> Mapping[str, Any]:
            now, then = value_of(size), value_of(first)
            return {"size": f"rms of the weights looked at {now:.3g}, {then:.3g} before the first update"}

        return () if growth is None else (Sample("params.growth", step, growth, labels, detail=facts),)


def _growth(usual: float, size: float, first: float) -> float | None:
    if not first:
        return None
    # Small on purpose, as the last layer of a residual branch: growing up to the usual size is what it is meant to do.
    if first < TINY * usual and size > first:
        return max(1.0, size / usual)
    return size / first


def _usual(params: Sequence[Any]) -> float:
    """Root mean square that ``nn.Linear`` would give weights of these shapes."""
    if any(p.dim() < 2 for p in params):
        return 0.0
    return math.sqrt(sum(int(p.shape[0]) for p in params) / (3 * sum(int(p.numel()) for p in params)))


def looked_at(optimizer: Any) -> list[Any]:
    """At most :data:`TENSORS` trainable weights of an optimizer: matrices, where it has any."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    matrices = [p for p in params if p.dim() > 1] or params
    return list(evenly(matrices, TENSORS))


def _size(sampler: ElementSampler) -> Any:
    """Root mean square over the tensors looked at, each weighed by what its elements stand for."""
    elements = sum(int(sampler.params[i].numel()) for group in sampler.groups for i in group)
    sizes = [sampler.sizes(group) for group in sampler.groups]

    def compute(*vectors: Sequence[float]) -> float:
        total = sum(sum(map(mul, squares, weights)) for squares, weights in zip(vectors, sizes, strict=True))
        return math.sqrt(total / max(elements, 1))

    return calculate(compute, *sampler.squares())
