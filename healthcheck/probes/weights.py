"""Weights, running statistics and optimizer states: are they finite, are tied weights still tied, and how large are they: before
the first update (rows that are all alike, layers that blow their input up), and since.

Methods: symmetry breaking as in Goodfellow, Bengio, Courville (2016), 8.4; gain of a layer against its fan-in as in
Glorot and Bengio (2010) and He et al. (2015).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, count, largest, numbers, value_of, values_of
from healthcheck.device.sampling import ElementSampler
from healthcheck.device.tensors import evenly, l2_norms, local_part
from healthcheck.probes.gradients import bad_weight_facts
from healthcheck.probes.labels import first_few, optimizer_labels
from healthcheck.probes.looks import LOOK_SELDOM, SeenModules, ask_again, next_look

TIES_EVERY = 50
"""Steps between two looks at tied weights: they are lost by an assignment, never gradually."""


class WeightProbe:
    """Counts weights that are not finite, or nothing at all: when a rule is due, and before a checkpoint is trusted."""

    name = "weights"
    stretchable = ("params.nonfinite", "params.zero")
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("params.nonfinite", "Parameters that hold a NaN or infinity.", cost=Cost.DEVICE),
        Metric("params.zero", "Trainable weight matrices that are entirely zero.", cost=Cost.DEVICE),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        saved = event.kind is EventKind.CHECKPOINT_SAVED
        keys = {key for key in self.stretchable if demand.wants(key) and (saved or demand.due(key, event.step))}
        if not keys or event.model is None:
            return ()
        named = [(name, p) for name, p in event.model.named_parameters() if _can_be_bad(p)]
        return list(self._samples(event.step, keys, named)) if named else ()

    @staticmethod
    def _samples(step: int, keys: Collection[str], named: Sequence[tuple[str, Any]]) -> Iterable[Sample]:
        norms = numbers(l2_norms([p for _, p in named]))
        if "params.nonfinite" in keys:
            bad = calculate(_not_finite, norms)
            yield Sample("params.nonfinite", step, bad, detail=lambda: {"weights": bad_weight_facts(named)})
        if "params.zero" in keys:
            matrices = [p.dim() > 1 and p.requires_grad for _, p in named]
            names = [name for name, _ in named]

            def zero(given: Sequence[float]) -> float:
                return float(sum(norm == 0 and matrix for norm, matrix in zip(given, matrices, strict=True)))

            def facts() -> Mapping[str, Any]:
                found = zip(names, values_of(norms), matrices, strict=True)
                return {"which": first_few(name for name, norm, matrix in found if norm == 0 and matrix)}

            yield Sample("params.zero", step, calculate(zero, norms), detail=facts)


def _not_finite(norms: Sequence[float]) -> float:
    """How many tensors hold a NaN or infinity: the norm of finite float32 numbers, in float64, cannot overflow."""
    return float(len(norms) - sum(map(math.isfinite, norms)))


def _which_are_not_finite(names: Sequence[str], norms: Sequence[float]) -> list[str]:
    return [name for name, norm in zip(names, norms, strict=True) if not math.isfinite(norm)]


class TiedWeightProbe:
    """Notices weights that were one tensor and are two, or that the model's own settings tie.

    At the first look it notes which modules share a parameter; a transformers-style config with
    ``tie_word_embeddings`` says by itself that input and output embeddings should be one.
    """

    name = "tied-weights"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("params.tied_lost", "Pairs of weights that should be one tensor and are not.", cost=Cost.HOST),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._ties: list[list[str]] | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        modules = event.model.named_modules()
        if not modules:
            return ()
        if self._ties is not None and event.step < self.rests_until:  # the second optimizer of a step
            return ()
        # At multiples, so that the optimizers of one step look together.
        self.rests_until = next_look(event.step, TIES_EVERY, LOOK_SELDOM)
        if self._ties is None:
            self._ties = _shared(modules)
        held = _held(modules)
        lost = [
            f"{first} and {name}"
            for first, *others in self._ties
            for name in others
            if name in held and first in held and held[name] is not held[first]
        ]
        lost += [text for text in _broken_promises(modules) if text not in lost]

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(lost)}

        return (Sample("params.tied_lost", event.step, float(len(lost)), detail=facts),)


def _can_be_bad(parameter: Any) -> bool:
    real = parameter.is_floating_point() or parameter.is_complex()  # quantised integers are always finite
    return bool(real and parameter.numel() and parameter.device.type != "meta")


def _held(modules: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Every parameter under every name that it has, unlike ``named_parameters``."""
    return {
        f"{name}.{key}" if name else key: parameter
        for name, module in modules
        for key, parameter in getattr(module, "_parameters", {}).items()
        if parameter is not None
    }


def _shared(modules: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """Names that stand for one tensor, by tensor. Names only, so that no model is kept alive."""
    owners: dict[int, list[str]] = {}
    for name, parameter in _held(modules).items():
        owners.setdefault(id(parameter), []).append(name)
    # Names only: no parameter, and so no model, is kept alive.
    return [names for names in owners.values() if len(names) > 1]


def _broken_promises(modules: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, module in modules:
        config = getattr(module, "config", None)
        if not getattr(config, "tie_word_embeddings", False):
            continue
        given, wanted = getattr(module, "get_input_embeddings", None), getattr(module, "get_output_embeddings", None)
        if not callable(given) or not callable(wanted):
            continue
        first, last = given(), wanted()
        one, other = getattr(first, "weight", None), getattr(last, "weight", None)
        if one is not None and other is not None and one is not other and one.shape == other.shape:
            yield f"input and output embeddings of {name or type(module).__name__}"


_NAMES = ("running_mean", "running_var")


class RunningStatisticsProbe:
    """Counts running means and variances with a NaN or infinity: when a rule is due, and before a checkpoint is trusted.

    A batch with a NaN that the loop skips (``if not isfinite(loss): continue``) has already gone through the forward
    pass: in train mode nothing shows, in eval mode every output is NaN. Other buffers may hold infinities on purpose,
    as masks of attention do.
    """

    name = "running-statistics"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "buffers.nonfinite",
            "Running statistics of normalisation layers that hold a NaN or infinity.",
            cost=Cost.DEVICE,
            needs=("running statistics",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._modules = SeenModules()
        self._layers: list[tuple[str, Callable[[], Any]]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        saved = event.kind is EventKind.CHECKPOINT_SAVED
        if event.model is None or not demand.wants("buffers.nonfinite"):
            return ()
        if not saved and not demand.due("buffers.nonfinite", event.step):
            return ()
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._layers = [(name, weak(module)) for name, module in modules if _statistics(module)]
        if not self._layers:
            self.rests_until = max(ask_again(event.step), demand.next_due(("buffers.nonfinite",), event.step))
            return ()
        alive = ((name, ref()) for name, ref in self._layers)
        named = [
            (f"{name}.{key}" if name else key, tensor)
            for name, module in alive
            if module is not None
            for key, tensor in _statistics(module).items()
        ]
        if not named:
            return ()
        norms = numbers(l2_norms([tensor for _, tensor in named]))
        names = [name for name, _ in named]

        def facts() -> Mapping[str, Any]:
            hit = _which_are_not_finite(names, values_of(norms))
            return {"which": first_few(hit), "buffers": f"{len(hit):,} of {len(names):,} running statistics"}

        return (Sample("buffers.nonfinite", event.step, calculate(_not_finite, norms), detail=facts),)


def _statistics(module: Any) -> dict[str, Any]:
    buffers = getattr(module, "_buffers", {})
    found = {key: buffers.get(key) for key in _NAMES}
    return {key: t for key, t in found.items() if t is not None and t.is_floating_point() and t.device.type != "meta"}


class OptimizerStateProbe:
    """Counts state tensors (moments, velocities) with a NaN or infinity: when a rule is due, and at checkpoints."""

    name = "optimizer-state"
    stretchable = ("optimizer.nonfinite",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.AFTER_UPDATE, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.AFTER_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.nonfinite", "Tensors of the optimizer's state that hold a NaN or infinity.", cost=Cost.DEVICE
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if event.kind is EventKind.CHECKPOINT_SAVED:
            listed = list(enumerate(event.model.optimizers()))
        elif event.optimizer is not None and demand.due("optimizer.nonfinite", event.step):
            listed = [(event.optimizer_index, event.optimizer)]
        else:
            return ()
        return [sample for index, optimizer in listed for sample in self._look(event, index, optimizer)]

    def _look(self, event: Event, index: int, optimizer: Any) -> Iterable[Sample]:
        assert event.model is not None
        names = {id(p): name for name, p in event.model.named_parameters()}
        found = _state_tensors(optimizer, names)
        if not found:
            return
        norms = numbers(l2_norms([tensor for _, tensor in found]))
        states = [name for name, _ in found]

        def facts() -> Mapping[str, Any]:
            hit = _which_are_not_finite(states, values_of(norms))
            return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(states):,} state tensors not finite"}

        yield Sample(
            "optimizer.nonfinite", event.step, calculate(_not_finite, norms), optimizer_labels(index), detail=facts
        )


def _state_tensors(optimizer: Any, names: Mapping[int, str]) -> list[tuple[str, Any]]:
    """``exp_avg of head.weight`` and its tensor; step counters and integer codes are always finite."""
    import torch

    found: list[tuple[str, Any]] = []
    for parameter, state in getattr(optimizer, "state", {}).items():
        if not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() and value.is_floating_point():
                found.append((f"{key} of {names.get(id(parameter), '?')}", value))
    return found


# --------------------------------------------------------------------------------------------------
# How large they are.


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
    rests_for_all = True
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
    elements = sum([int(sampler.params[i].numel()) for group in sampler.groups for i in group])
    sizes = [sampler.sizes(group) for group in sampler.groups]

    def compute(*vectors: Sequence[float]) -> float:
        total = sum(sum(map(mul, squares, weights)) for squares, weights in zip(vectors, sizes, strict=True))
        return math.sqrt(total / max(elements, 1))

    return calculate(compute, *sampler.squares())
