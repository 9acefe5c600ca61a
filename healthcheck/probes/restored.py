"""Weights put back or loaded without effect: an update that is undone before the next one, state dicts that fit nowhere or
are the model's own tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Labels, Metric, Sample
from healthcheck.device.deferred import calculate, numbers
from healthcheck.device.sampling import ROWS, ElementSampler, SampledRows
from healthcheck.probes.labels import first_few, optimizer_labels, where_called
from healthcheck.probes.weights import looked_at

AT_BOUND = 3
"""Elements as large as the largest one of their tensor from which on it is taken for clamped."""


@dataclass(slots=True)
class _Watch:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    before: list[SampledRows]
    moved: Sequence[Any] | None = None
    """What the update changed, as :meth:`ElementSampler.compare` sums it up."""
    bound: Sequence[Any] = ()
    """Elements of each tensor that are as large as its largest one."""


class RestoredWeightProbe:
    """Compares sampled weights before an update, after it, and before the next one.

    A tensor is *restored* if the update changed it and it then was again what it had been, to the last bit. A clamp
    that holds weights within bounds does that by design: tensors of which several elements are as large as the largest one,
    to the last bit, are left out.
    """

    name = "restored-weights"
    stretchable = ("params.restored",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "params.restored",
            "Share of the sampled tensors that an update changed and that were set back before the next one.",
            "fraction",
            Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._watches: dict[int, _Watch] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer, index = event.optimizer, event.optimizer_index
        if optimizer is None:
            return ()
        watch = self._watches.get(index)
        if watch is not None and watch.optimizer() is not optimizer:
            # Another optimizer took its place: its weights are others.
            del self._watches[index]
            watch = None
        if event.kind is EventKind.AFTER_UPDATE:
            if watch is not None and watch.moved is None:
                if event.skipped:
                    del self._watches[index]
                    return ()
                watch.moved = watch.sampler.compare(watch.before, watch.before)
                watch.bound = [numbers(_at_largest(rows.values)) for rows in watch.before]
            return ()
        samples = []
        if watch is not None and watch.moved is not None:
            del self._watches[index]
            now = watch.sampler.compare(watch.before, watch.before)
            samples.append(_restored(watch.moved, now, watch.bound, event.step, optimizer_labels(index)))
        if demand.due("params.restored", event.step):
            sampler = watch.sampler if watch is not None else ElementSampler(looked_at(optimizer))
            if sampler.groups:
                self._watches[index] = _Watch(weak(optimizer), sampler, sampler.weights("before"))
        if index not in self._watches:
            self.rests_until = demand.next_due(("params.restored",), event.step)
        return samples


def _at_largest(values: Any) -> Any:
    """How many elements of each row are as large as its largest one, to the last bit."""
    size = values.abs()
    return (size == size.amax(1, keepdim=True)).sum(1)


def _restored(moved: Sequence[Any], now: Sequence[Any], bound: Sequence[Any], step: int, labels: Labels) -> Sample:
    """The share of restored tensors, from sums of each one's elements after the update and now, against those before it.

    Weights of one size throughout have as many squares of the largest as they have elements that are not zero.
    """
    counted: list[int] = []
    groups = len(moved)

    def compute(*vectors: Sequence[float]) -> float:
        hits = moves = count = 0
        for then, today, largest_ones in zip(
            vectors[:groups], vectors[groups : 2 * groups], vectors[2 * groups :], strict=True
        ):
            n = len(then) // ROWS
            count += n
            for k in range(n):
                squares, changed, there, largest = (then[row * n + k] for row in (1, 2, 3, 5))
                # Changed by the update, and not a clamp that holds all weights at one size, or many at a bound.
                one_size = math.isclose(squares, there * largest * largest, rel_tol=1e-5)
                if changed and not one_size and largest_ones[k] < AT_BOUND:
                    moves += 1
                    hits += not today[2 * n + k]
        counted[:] = [hits, count]
        return hits / max(moves, 1)

    def facts() -> Mapping[str, Any]:
        return {"tensors": f"{counted[0]:,} of {counted[1]:,} sampled tensors"} if counted else {}

    return Sample("params.restored", step, calculate(compute, *moved, *now, *bound), labels, detail=facts)


class LoadedStateProbe:
    """Counts loads that changed nothing, in modules that are trained.

    *Unmatched*: with ``strict=False``, and not one name was found in the module that was given them. A checkpoint of
    a wrapped model (``module.``, ``model.``, ``_orig_mod.``) is the usual case. Loads of which a part fits are a way to
    begin with another model's body, and are not counted.

    *Own*: during the training, from tensors that are the module's own. ``best = model.state_dict()`` is no copy. The
    same is counted for *copies* of the trained model, which should have been given the model's weights.
    """

    name = "loaded-state"
    only_with = "loads"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric("state.unmatched", "State dicts loaded since the last step in which no name matched."),
        Metric(
            "state.own",
            "State dicts loaded since the last step that were the module's own tensors, not copies of them.",
        ),
        Metric(
            "state.own_copy",
            "The same for copies of the trained model, such as target networks: they were given their own weights.",
        ),
    )

    def __init__(self) -> None:
        self._begun = False
        """Whether both were given once: from then on only what is found is worth a sample."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        loads = event.loads
        if loads is None or (self._begun and not loads):
            return ()
        unmatched = [text for module, text in loads.unmatched if _is_part(module(), event)]
        samples = [
            *self._samples("state.unmatched", unmatched, event),
            *self._samples("state.own", [*loads.own], event),
            *self._samples("state.own_copy", [*loads.copies], event),
        ]
        self._begun = self._begun or bool(samples)
        return samples

    def _samples(self, metric: str, found: Sequence[str], event: Event) -> Iterable[Sample]:
        # A run that ends without a step has trained nothing of which it could be said that all was in order.
        if not found and (self._begun or event.kind is EventKind.TRAIN_END):
            return ()
        facts = {"which": first_few(found)} | (where_called(event, "load") if found else {})
        return (Sample(metric, event.step, float(len(found)), detail=lambda: facts),)


def _is_part(module: Any, event: Event) -> bool:
    return module is not None and event.model is not None and any(m is module for _, m in event.model.named_modules())
