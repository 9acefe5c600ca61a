"""Weights, running statistics and optimizer states: are they finite? And are tied weights still tied?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, numbers, values_of
from healthcheck.device.tensors import is_tensor, l2_norms
from healthcheck.probes.gradients import bad_weight_facts
from healthcheck.probes.labels import first_few, optimizer_labels
from healthcheck.probes.looks import SeenModules

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
        self.rests_until = event.step - event.step % TIES_EVERY + TIES_EVERY
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
        found = list(_state_tensors(optimizer, names))
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


def _state_tensors(optimizer: Any, names: Mapping[int, str]) -> Iterable[tuple[str, Any]]:
    """``exp_avg of head.weight`` and its tensor; step counters and integer codes are always finite."""
    for parameter, state in getattr(optimizer, "state", {}).items():
        if not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if is_tensor(value) and value.dim() and value.numel() and value.is_floating_point():
                yield f"{key} of {names.get(id(parameter), '?')}", value
