"""Do the weights move, how far, do updates survive rounding, and do they last? From sampled elements.

A device sums up each tensor's elements in one launch; everything after that is arithmetic on some hundred numbers, for
which kernels would cost the host more than Python does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Labels, Metric, Sample
from healthcheck.device.deferred import calculate, numbers
from healthcheck.device.sampling import ROWS, ElementSampler, KeptSamplers, SampledRows, same_objects
from healthcheck.device.tensors import GRADIENT
from healthcheck.probes.labels import in_groups, optimizer_labels, where_in_model, with_label
from healthcheck.probes.learning_rate import rates_of
from healthcheck.probes.traits import poolers_of_libraries, routed_experts
from healthcheck.probes.weights import looked_at


def ratio_of(change: float, size: float) -> float:
    """sqrt(change / size); a tensor that was all zero and moved counts as 1, one that stayed as 0."""
    base = size if size > 0 else (change if change > 0 else 1.0)
    return math.sqrt(change / base)


class Moved:
    """What one update did to the sampled elements of some tensors.

    :param compared: for each group of tensors a vector with the rows of :data:`healthcheck.device.sampling.ROWS`.
    :param groups: positions of each group's tensors in the list of all.
    """

    def __init__(self, compared: Sequence[Any], groups: Sequence[Sequence[int]]) -> None:
        self.compared = tuple(compared)
        self.groups = groups

    def ratio(self, sizes: Sequence[Sequence[float]]) -> Any:
        """|dW| / |W| over all tensors; ``sizes``: per group, how many elements a sampled one stands for."""

        def compute(*vectors: Sequence[float]) -> float:
            change = size = 0.0
            for sums, weights in zip(vectors, sizes, strict=True):
                n = len(weights)
                change += sum(map(mul, sums[:n], weights))
                size += sum(map(mul, sums[n : 2 * n], weights))
            return ratio_of(change, size)

        return calculate(compute, *self.compared)

    def each_ratio(self) -> list[tuple[int, Any]]:
        """The same of every tensor, with its position."""
        return [
            (index, calculate(ratio_of, vector[k], vector[len(group) + k]))
            for vector, group in zip(self.compared, self.groups, strict=True)
            for k, index in enumerate(group)
        ]

    def lost(self, counts: Sequence[bool]) -> Any:
        """Part of the elements with something to apply that stayed as they were; None if there was nothing to apply.

        :param counts: which tensors count.
        """
        groups = self.groups

        def compute(*vectors: Sequence[float]) -> float | None:
            asked = gone = 0.0
            for sums, group in zip(vectors, groups, strict=True):
                n = len(group)
                for k, index in enumerate(group):
                    if counts[index]:
                        asked += sums[3 * n + k]
                        gone += sums[4 * n + k]
            return gone / asked if asked else None

        return calculate(compute, *self.compared)


class Streaks:
    """For how many updates in a row each tensor has stood still. Updates may wait here before they are counted."""

    def __init__(self, count: int, negligible: float) -> None:
        """``negligible``: part of the largest gradient up to which one counts as none."""
        self.negligible = negligible
        self.values = [0] * count
        self._highest = 0.0
        """Of the largest gradients so far: where they have all but gone, there is nothing left to learn."""
        self._waiting: list[tuple[Moved, list[bool], list[bool]]] = []

    def add(self, moved: Moved, without: list[bool], moves: list[bool]) -> None:
        """One update. ``without``: which tensors had no gradient; ``moves``: which have a rate that moves them."""
        self._waiting.append((moved, without, moves))

    def standing(self, patience: int) -> tuple[Any, Callable[[], list[int]]]:
        """How many tensors have stood still so long, and afterwards which."""
        waiting, self._waiting = self._waiting, []
        hit: list[int] = []

        def compute(*vectors: Sequence[float]) -> float:
            given = iter(vectors)
            for moved, without, moves in waiting:
                pairs = [(next(given), group) for group in moved.groups]
                # Against the largest gradient of all tensors: a bias in front of a normalisation has only rounding noise.
                largest = max((max(sums[5 * len(group) :]) for sums, group in pairs), default=0.0)
                if largest > self._highest:
                    self._highest = largest
                converged = largest < CONVERGED * self._highest
                for sums, group in pairs:
                    self._count(sums, group, without, moves, math.inf if converged else self.negligible * largest)
            hit.extend(index for index, streak in enumerate(self.values) if streak >= patience)
            return float(len(hit))

        return calculate(compute, *(vector for moved, *_ in waiting for vector in moved.compared)), lambda: hit

    def _count(
        self, sums: Sequence[float], group: Sequence[int], without: list[bool], moves: list[bool], noise: float
    ) -> None:
        n = len(group)
        changed, gradient = sums[2 * n : 3 * n], sums[5 * n :]
        for k, index in enumerate(group):
            if changed[k]:
                self.values[index] = 0
            elif moves[index] and (gradient[k] > noise or without[index]):
                self.values[index] += 1


PATIENCE = 5
"""Updates that a tensor may stand still before it counts as unmoved."""

FADED = 1e-3
"""Part of its highest value under which a learning rate has faded out."""

NEGLIGIBLE = 1e-6
"""Part of the largest gradient under which an element's own is noise."""

CONVERGED = 1e-4
"""Part of the largest gradient so far under which the largest of all tensors is what is left when a model has learnt."""

_KEYS = ("update_ratio", "update_ratio[]", "updates.lost", "params.unmoved")


@dataclass(slots=True)
class _Watched:
    """What is remembered of one optimizer."""

    optimizer: Callable[[], Any]
    """A weak reference: a replaced optimizer must not live on because we looked at it."""
    names: list[str]
    rates: list[float]
    peaks: list[float]
    """Highest learning rate that each parameter had so far."""
    low: list[bool]
    sampler: ElementSampler
    streaks: Streaks
    """For how many checks in a row each tensor has stood still."""
    before: list[SampledRows] | None = None
    gradients: list[SampledRows] | None = None
    without: list[bool] = field(default_factory=list)
    """Which tensors have no gradient; none of them while tensors take turns."""
    spare: list[bool] = field(default_factory=list)
    """Which tensors are of a library's pooler: that one has no gradient means that the task does without it."""
    absent: list[int] | None = None
    """What identifies the state of those without a gradient at the look before: torch's version number, else -1."""
    turns: bool = False
    """Tensors take turns in getting gradients, as heads and experts do: that one has none says nothing."""
    checks: int = 0


class MovementProbe:
    """Compares a few elements of each parameter just before and just after the update.

    A tensor is *unmoved* if none of its elements changed in five checked updates although its
    learning rate was above zero (and above a thousandth of its highest: a schedule that fades out may
    round to nothing) and there was something to apply: a finite gradient that is neither zero at these elements nor
    noise against the others, or no gradient at any look. Once all gradients have faded, weights that stand still have converged. Tensors frozen with ``requires_grad=False``, rows of an
    embedding that no batch used, and updates that a ``GradScaler`` skipped do not count.
    """

    name = "movement"
    stretchable = ("update_ratio", "update_ratio[]", "updates.lost", "params.unmoved")
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric("update_ratio", "|dW| / |W| of the update over all trainable parameters.", cost=Cost.DEVICE),
        Metric("update_ratio", "|dW| / |W| of one parameter.", cost=Cost.DEVICE, labels=("parameter",)),
        Metric(
            "updates.lost",
            "Part of the elements of bf16 and fp16 weights whose update rounded to nothing.",
            "fraction",
            Cost.DEVICE,
            needs=("half precision weights",),
        ),
        Metric(
            "params.unmoved",
            f"Trainable tensors that did not change in {PATIENCE} updates although lr > 0.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self._known: dict[int, _Watched] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None or event.model is None:
            return ()
        if event.kind is EventKind.BEFORE_UPDATE:
            if any(demand.due(key, event.step) for key in _KEYS):
                self._look_before(event, demand)
            return ()
        seen = self._known.get(event.optimizer_index)
        if seen is None or seen.before is None or seen.optimizer() is not event.optimizer:
            return ()
        # Compared once: a second event after the same update would see no change.
        before, seen.before = seen.before, None
        if event.skipped:
            return ()
        return list(self._compare(event, demand, seen, before))

    def _look_before(self, event: Event, demand: Demand) -> None:
        seen = self._watch(event)
        seen.rates = rates_of(event.optimizer, seen.sampler.params)
        seen.peaks = list(map(max, seen.rates, seen.peaks))
        seen.before = seen.sampler.weights("before")
        seen.gradients = None
        if demand.wants("params.unmoved") or (demand.wants("updates.lost") and any(seen.low)):
            params = seen.sampler.params
            gradients = list(map(GRADIENT, params))
            seen.gradients = seen.sampler.gradients(of=gradients)
            # A tensor without a gradient now that had one at the look before, or was changed since, has its turns.
            absent = [-1 if gradient is not None else p._version for p, gradient in zip(params, gradients, strict=True)]
            seen.turns = seen.turns or (seen.absent is not None and absent != seen.absent)
            # While tensors take turns, an absent gradient is no sign of anything.
            seen.absent = absent
            seen.without = [
                version >= 0 and not seen.turns and not spare for version, spare in zip(absent, seen.spare, strict=True)
            ]

    def _watch(self, event: Event) -> _Watched:
        assert event.model is not None
        params = [p for group in event.optimizer.param_groups for p in group["params"] if p.requires_grad]
        seen = self._known.get(event.optimizer_index)
        if seen is not None and seen.optimizer() is event.optimizer and same_objects(params, seen.sampler.params):
            return seen
        # What was known of optimizers that are gone holds their parameters.
        self._known = {k: w for k, w in self._known.items() if w.optimizer() is not None}
        by_id = {id(p): name for name, p in event.model.named_parameters()}
        names = [by_id.get(id(p), f"param{i}") for i, p in enumerate(params)]
        low = [p.is_floating_point() and p.element_size() == 2 for p in params]
        streaks = Streaks(len(params), NEGLIGIBLE)
        seen = _Watched(weak(event.optimizer), names, [], [0.0] * len(params), low, ElementSampler(params), streaks)
        seen.turns = bool(routed_experts(event.model))
        spare = poolers_of_libraries(event.model)
        seen.spare = [id(p) in spare for p in params]
        self._known[event.optimizer_index] = seen
        return seen

    def _compare(self, event: Event, demand: Demand, seen: _Watched, before: list[SampledRows]) -> Iterable[Sample]:
        labels, step = optimizer_labels(event.optimizer_index), event.step
        groups, names = seen.sampler.groups, seen.names
        moved = Moved(seen.sampler.compare(before, seen.gradients), groups)
        found: list[tuple[str, Any]] = []
        if demand.due("update_ratio[]", step):
            for index, ratio in moved.each_ratio():
                if seen.rates[index] != 0.0:
                    yield Sample("update_ratio", step, ratio, with_label(labels, "parameter", names[index]))
        if demand.due("update_ratio", step):
            found.append(("update_ratio", moved.ratio(list(map(seen.sampler.sizes, groups)))))
        if seen.gradients is not None and demand.due("updates.lost", step) and any(seen.low):
            counts = [low and rate != 0.0 for low, rate in zip(seen.low, seen.rates, strict=True)]
            found.append(("updates.lost", moved.lost(counts)))
        yield from (Sample(name, step, value, labels) for name, value in found if value is not None)
        if seen.gradients is not None and demand.due("params.unmoved", step):
            seen.checks += 1
            seen.streaks.add(moved, seen.without, _moving(seen))
            if seen.checks >= PATIENCE:
                count, which = seen.streaks.standing(PATIENCE)

                def facts() -> Mapping[str, Any]:
                    hit = [names[index] for index in which()]
                    tensors = f"{len(hit):,} of {len(names):,} trainable tensors"
                    return {"which": in_groups(hit, names), "tensors": tensors} | where_in_model(event, hit)

                yield Sample("params.unmoved", step, count, labels, detail=facts)


def _moving(seen: _Watched) -> list[bool]:
    """Which tensors have a learning rate that should move them."""
    return [rate > FADED * peak for rate, peak in zip(seen.rates, seen.peaks, strict=True)]


# --------------------------------------------------------------------------------------------------
# Weights that an update moved and that are back before the next one.


AT_BOUND = 3
"""Elements as large as the largest one of their tensor from which on it is taken for clamped."""


@dataclass(slots=True)
class _Restoring:
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
        self._watches: dict[int, _Restoring] = {}
        self._samplers = KeptSamplers()

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
            sampler = self._samplers.of(optimizer, looked_at(optimizer))
            if sampler.groups:
                self._watches[index] = _Restoring(weak(optimizer), sampler, sampler.weights("before"))
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
                if not then[2 * n + k] or largest_ones[k] >= AT_BOUND:
                    continue
                # Changed by the update, and not a clamp that holds all weights at one size, or many at a bound.
                squares, there, largest = then[n + k], then[3 * n + k], then[5 * n + k]
                if not math.isclose(squares, there * largest * largest, rel_tol=1e-5):
                    moves += 1
                    hits += not today[2 * n + k]
        counted[:] = [hits, count]
        return hits / max(moves, 1)

    def facts() -> Mapping[str, Any]:
        return {"tensors": f"{counted[0]:,} of {counted[1]:,} sampled tensors"} if counted else {}

    return Sample("params.restored", step, calculate(compute, *moved, *now, *bound), labels, detail=facts)
