"""Gradient norms before clipping, gradients that are not finite or exactly zero, and who carries them."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow, Update
from healthcheck.core.samples import BETWEEN, NO_LABELS, Cost, Labels, Metric, Sample
from healthcheck.device.between import WORDS
from healthcheck.device.deferred import DeviceScalar, DeviceVector, calculate, number, quotient, value_of, values_of
from healthcheck.device.tensors import nonfinite_counts, plain_values
from healthcheck.probes.gradient_statistics import (
    GradientPass,
    GradientStats,
    InnerPass,
    gradient_stats,
)
from healthcheck.probes.labels import first_few, optimizer_labels, with_label
from healthcheck.probes.trained_parameters import TrainedParameters

_KEPT = 32
"""Steps whose facts are kept: values from a device arrive that much later at most, or nearly so."""


class RecentGradients:
    """What is known of the gradients of the last steps, for the messages of other rules.

    One for the probes of a session: that of the gradients fills it, that of the loss reads it.
    """

    def __init__(self) -> None:
        self._facts: dict[int, Callable[[], Mapping[str, Any]]] = {}

    def remember(self, step: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """:param facts: called when a message needs them; must speak of that step, as the gradients were
        before clipping spread a NaN over all parameters.
        """
        self._facts[step] = facts
        # Steps come in order, so the first key is the oldest.
        if len(self._facts) > _KEPT:
            del self._facts[next(iter(self._facts))]

    def of(self, step: int) -> Callable[[], Mapping[str, Any]] | None:
        """The facts of a step, None if there are none (any more)."""
        return self._facts.get(step)


def bad_gradient_facts(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``{"first": "head.scale, 1 of 64 values", "tensors": "1 of 24 gradients not finite"}``.

    ``first`` is the first in the order of the model, which need not be where it began.
    """
    with_gradient = [(name, p.grad) for name, p in named if p.grad is not None]
    return _facts(with_gradient, "gradients")


def bad_weight_facts(named: Iterable[tuple[str, Any]]) -> str:
    """``finite``, or ``3 of 24 tensors not finite, first head.weight``."""
    facts = _facts([(name, p) for name, p in named], "tensors")
    return f"{facts['tensors']}, first {facts['first']}" if facts else "finite"


def loss_facts(
    named: Sequence[tuple[str, Any]],
    known: Callable[[], Mapping[str, Any]] | None,
    *,
    late: bool = False,
    batch: Sequence[tuple[str, Any]] = (),
    cause: str = "",
) -> dict[str, Any]:
    """What is known beside a non-finite loss: bad inputs, bad gradients of that step, state of the weights.

    :param known: what is known of the gradients of that step (:class:`RecentGradients`).
    :param late: the loss came from a device; the gradients that are there now are of a later step.
    :param batch: tensors of that step's batch, by name.
    :param cause: what the graph of the loss showed.
    """
    facts: dict[str, Any] = {"cause": cause} if cause else {}
    bad_input = _facts([(name, tensor) for name, tensor in batch if tensor.is_floating_point()], "tensors")
    if bad_input:
        facts["input"] = f"the batch itself is not finite: {bad_input['first']}"
    if known is not None:
        # Statistics of that very step, even if its gradients are long overwritten.
        facts |= {key: value for key, value in known().items() if key != "largest"}
    elif not late:
        facts |= bad_gradient_facts(named)
    facts["weights"] = bad_weight_facts(named)
    return facts


def _facts(named: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    import torch

    first, bad = "", 0
    with waiting_allowed():
        for name, tensor in named:
            # Some types and layouts cannot be asked for finiteness; what they hold stays unknown.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                values = plain_values(tensor)[0]
                count = int((~torch.isfinite(values)).sum())
                if count:
                    bad += 1
                    first = first or f"{name}, {count:,} of {values.numel():,} values"
    return {"first": first, "tensors": f"{bad:,} of {len(named):,} {what} not finite"} if bad else {}


@contextlib.contextmanager
def waiting_allowed() -> Iterator[None]:
    """For reads after a hit: a script that makes waits an error means its own, and those of healthy steps."""
    import torch

    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:  # nothing to allow, and setting it makes torch warn
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class GradientFacts:
    """Facts for a message, from the statistics that came with the value: of its step, not of a later one.

    :param names: of all parameters, also of those without a gradient.
    :param factor: takes out of a norm what clipping or a loss scale did to it.
    """

    __slots__ = ("_all_names", "_factor", "_stats")

    def __init__(self, stats: GradientStats, names: Sequence[str], factor: Any = None) -> None:
        self._stats = stats
        self._all_names = names
        self._factor = factor

    @property
    def names(self) -> list[str]:
        """Of the parameters with a gradient."""
        return [self._all_names[i] for i in self._stats.indices]

    def __call__(self) -> dict[str, Any]:
        """``first`` of the gradients that are not finite and how many ``tensors`` they are, else the ``largest``."""
        stats, names = self._stats, self.names
        numbers = values_of(stats.numbers)
        norms = stats.row_of(numbers, "norm")
        bad = [k for k, norm in enumerate(norms) if not math.isfinite(norm)]
        if bad:
            first = names[bad[0]]
            if stats.has("nonfinite"):
                count = numbers[stats.position("nonfinite", bad[0])]
                first += f", {count:,.0f} of {stats.lengths[bad[0]]:,} values"
            return {"first": first, "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        k = max(range(len(norms)), key=norms.__getitem__)
        norm = norms[k] * (1.0 if self._factor is None else value_of(self._factor))
        return {"largest": f"{names[k]}, norm {norm:.3g}"}

    def zero(self) -> dict[str, Any]:
        """Which gradients were exactly zero."""
        names = self.names
        hit = [name for name, flag in zip(names, self._zero_flags(values_of(self._stats.numbers)), strict=True) if flag]
        return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(names):,} gradients exactly zero"}

    def zero_count(self, numbers: Sequence[float]) -> float:
        """How many gradients were exactly zero, from the numbers of the statistics."""
        return float(sum(self._zero_flags(numbers)))

    def zero_count_on_device(self, vector: Any) -> Any:
        """About the same for a gate: a bias counts by itself here."""
        first = len(self._stats.fields)  # norms are the first row behind the totals
        return (vector[first : first + len(self._stats.indices)] == 0).sum()

    def _zero_flags(self, numbers: Sequence[float]) -> list[bool]:
        norms = self._stats.row_of(numbers, "norm")
        # Nearly always so, and found out in C.
        if 0.0 not in norms:
            return [False] * len(norms)
        return [norm == 0 == norms[k] for norm, k in zip(norms, _with_weight(self.names), strict=True)]


def _facts_of(stats: GradientStats, names: Sequence[str], factor: Any) -> dict[str, Any]:
    return GradientFacts(stats, names, factor)()


def _zeros_of(stats: GradientStats, names: Sequence[str]) -> dict[str, Any]:
    return GradientFacts(stats, names).zero()


def _with_weight(names: Sequence[str]) -> list[int]:
    """Which tensor must be without a gradient, too, for each to count: of a bias, the weight of its layer.

    The gradient of a bias cancels where the loss does not change when all answers are shifted (the difference of two
    means, a distance, a softmax). A layer whose weight gets a gradient is not dead.
    """
    index = {name: k for k, name in enumerate(names)}
    found = []
    for k, name in enumerate(names):
        layer, dot, own = name.rpartition(".")
        found.append(index.get(layer + dot + own.replace("bias", "weight"), k))
    return found


# --------------------------------------------------------------------------------------------------
# Gradient norms before clipping, gradients that are not finite or exactly zero, and who carries them.


_BESIDES = ("grad_norm[]", "grad_nonfinite", "grads.zero", "grad.layer_ratio")
"""What rules may want besides the norm of all."""


class GradientProbe:
    """One pass over the gradients per step, as early as they can be read unscaled.

    Without a loss scale that is the end of the backward pass: clipping multiplies every gradient
    by the same number, so that afterwards one NaN has become all NaN. Under a ``GradScaler`` it is
    the moment before the update, when gradients are unscaled. Where the loop clips, its own norm
    is the norm before clipping.
    """

    name = "gradients"
    stretchable = _BESIDES
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (
        EventKind.BACKWARD_END,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    answers_once = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE, EventKind.STEP_END)
    noted = listens_to
    provides: tuple[Metric, ...] = (
        Metric("grad_norm", "Global L2 norm of the gradients before clipping.", cost=Cost.DEVICE),
        Metric("grad_norm", "L2 norm of one parameter's gradient.", cost=Cost.DEVICE, labels=("parameter",)),
        Metric("grad_nonfinite", "Gradient elements that are NaN or infinite.", cost=Cost.DEVICE),
        Metric(
            "grads.zero",
            "Trainable tensors whose gradient is exactly zero; a bias where that of its weight is zero, too.",
            cost=Cost.DEVICE,
        ),
        Metric(
            "grad.layer_ratio",
            "Gradient norm of the first weight matrix divided by that of the last.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self, recent: RecentGradients | None = None) -> None:
        self._recent = recent or RecentGradients()
        self._given: dict[int, int] = {}
        """Step of the last answer, by optimizer."""
        self._kept: set[int] = set()
        """Optimizers of which the device has kept something since the last look, by index."""
        self._looked: dict[int, int] = {}
        """Step of the last look for a row, by optimizer."""
        self._dims: dict[int, tuple[list[str], list[int]]] = {}
        """By optimizer: names of the parameters looked at last, and how many dimensions each has."""
        self._trained: defaultdict[int, TrainedParameters] = defaultdict(TrainedParameters)
        """By optimizer."""
        self._passes: dict[int, GradientPass] = {}
        self._labels: dict[Labels, tuple[list[str], list[Labels]]] = {}
        self._besides: tuple[str, ...] = _BESIDES
        """What is wanted besides the norm of all."""

    def plan(self, demand: Demand) -> None:
        self._besides = tuple(key for key in _BESIDES if demand.wants(key))

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        index = event.optimizer_index
        if self._given.get(index) == event.step:
            return ()
        before_update = event.kind is EventKind.BEFORE_UPDATE
        if not before_update:
            if event.kind is not EventKind.BACKWARD_END:
                return self._afterwards(event, demand)
            # Still multiplied with the loss scale: wait until they are unscaled, before the update.
            if event.loss_scale is not None:
                return ()
        trained = self._trained[index]
        params = trained.of(event)
        if not params:
            return ()
        stats = self._measured(params, index, event.kept_gradients, demand)
        if stats is None:
            return ()
        self._given[index] = event.step
        given = None if event.grad_norm is None else number(event.grad_norm)
        factor = _to_undo(event.optimizer, given, event.max_norm) if before_update else None
        facts = GradientFacts(stats, trained.names, factor)
        measured = _Measured(stats, facts, _matrices(params, stats), factor, index)
        return self._samples(event.step, measured, given, [key for key in self._besides if key in demand.due_now])

    def _measured(self, params: Sequence[Any], index: int, kept: Any, demand: Demand) -> GradientStats | None:
        if params[0].is_cpu:  # there nothing can be prepared from step to step
            stats = gradient_stats(params, kept)
        else:
            stats = self._pass(index).measure(params, self._trained[index].names, kept)
        if stats is not None and stats.norm is None:
            self._count(stats, params, demand)
        return stats

    def _pass(self, index: int) -> GradientPass:
        known = self._passes.get(index)
        if known is None:
            known = self._passes[index] = GradientPass()
        return known

    @staticmethod
    def _count(stats: GradientStats, params: Sequence[Any], demand: Demand) -> None:
        """What is not finite, where a rule wants to know it and nobody has counted."""
        if "grad_nonfinite" in demand.due_now and not stats.has("nonfinite"):
            stats.nonfinite = nonfinite_counts([params[i].grad for i in stats.indices]).sum()

    def look(self, row: StepRow, update: Update) -> None:
        """The same for a step that is noted in a row: what is measured now, :meth:`sample_rows` makes samples of later.

        The row's loss and norm are measured with the gradients where they are on their device, and compared with
        :attr:`~healthcheck.core.rows.Update.limits`.
        """
        index, step = update.optimizer_index, row.step
        if self._looked.get(index) == step or (not update.final and row.loss_scale is not None):
            return
        trained = self._trained[index]
        params = trained.of(update)
        if not params:
            return
        if params[0].is_cpu:
            stats = gradient_stats(params, update.kept_gradients)
        else:
            known = self._passes.get(index) or self._pass(index)
            given = row.grad_norm
            stats = known.measure(params, trained.names, update.kept_gradients, row.loss, given, update.limits)
            if type(given) is DeviceScalar and given.vector is not None:
                row.late.remove(given)
        if stats is None:
            return
        self._looked[index] = step
        row.breach = stats.breach
        if index in self._kept:
            self._kept.discard(index)
            row.found["between"] = stats.words
        factor = None
        if update.final and (row.max_norm is not None or row.loss_scale is not None):
            factor = _to_undo(update.optimizer, row.grad_norm, row.max_norm)
        names, dims = trained.names, self._dims.get(index)
        if dims is None or names is not dims[0]:
            dims = self._dims[index] = names, [p.dim() for p in params]
        row.found["gradients"] = stats, names, factor, index, dims[1], update.demand.due_now
        norm, numbers = stats.norm, stats.numbers
        if norm is not None:
            row.norm = norm
            if norm - norm != 0.0:
                self._recent.remember(step, GradientFacts(stats, names, factor))
        elif type(numbers) is DeviceVector and numbers.own_page is not None:
            row.numbers = numbers
        else:
            if "nonfinite" not in stats.fields:
                self._count(stats, params, update.demand)
            row.late.append(numbers)

    def keep_unread(self, update: Update, step: int) -> bool:
        """The same for a step that nobody watches: the device keeps what came of it until the next look. False if it cannot.

        What is kept are norms of gradients as they are: nothing may have scaled or clipped them.
        """
        trained = self._trained[update.optimizer_index]
        params = trained.of(update)
        known = self._passes.get(update.optimizer_index)
        if not params or known is None or not known.keep(params, step, trained.names):
            return False
        self._kept.add(update.optimizer_index)
        return True

    def _between(self, words: DeviceVector, row: StepRow, labels: Labels) -> list[Sample]:
        """What the device has kept of the steps before that nobody watched."""
        nonfinite, bad, largest, at = words.numbers()[-len(WORDS) :]
        made: list[Sample] = []
        if largest:
            made.append(Sample("grad_norm", int(at), largest, labels, BETWEEN, row.update_time))
        if nonfinite:
            if "grad_nonfinite" in self._besides:
                made.append(Sample("grad_nonfinite", int(bad), nonfinite, labels, BETWEEN, row.update_time))
            made.append(Sample("grad_norm", int(bad), math.nan, labels, BETWEEN, row.update_time))
        return sorted(made, key=operator.attrgetter("step"))

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            step, found = row.step, row.found.get("gradients")
            if found is None:
                made += self._reported(row)
                continue
            stats, names, factor, index, dims, due_now = found
            words = row.found.pop("between", None)
            if words is not None:
                made += self._between(words, row, optimizer_labels(index))
            if self._given.get(index) == step:
                continue
            self._given[index] = step
            numbers = stats.numbers
            if type(numbers) is DeviceVector and numbers.floats is not None:  # who asks from now on has less to do
                stats.numbers = numbers.floats
                stats.norm = numbers.floats[0]
            norm, time, due = stats.norm, row.update_time, list[str]()
            for key in self._besides:
                if key in due_now:
                    due.append(key)
            given = row.grad_norm
            value = norm if given is None and factor is None else given
            if (
                type(norm) is not float
                or norm - norm != 0.0
                or type(value) is not float
                or value - value != 0.0
                or (factor is not None and type(factor) is not float)
            ):
                made += self._of_row(row, stats, GradientFacts(stats, names, factor), due, dims, factor, index)
                continue
            # Nearly always so: finite, on the host, and the loop's own norm where it clips.
            labels = optimizer_labels(index) if index else NO_LABELS
            detail = partial(_facts_of, stats, names, factor)
            made.append(Sample("grad_norm", step, value, labels, "train", time, detail))
            for key in due:
                if key == "grad_nonfinite":
                    made.append(Sample(key, step, 0.0, labels, "train", time, detail))
                elif key == "grads.zero" and 0.0 not in stats.numbers[len(stats.fields) :][: len(stats.indices)]:
                    made.append(Sample(key, step, 0.0, labels, "train", time, partial(_zeros_of, stats, names)))
                else:
                    facts = GradientFacts(stats, names, factor)
                    made += self._of_row(row, stats, facts, [key], dims, factor, index)[1:]
        return made

    def _of_row(
        self,
        row: StepRow,
        stats: GradientStats,
        facts: GradientFacts,
        due: Sequence[str],
        dims: Sequence[int],
        factor: Any,
        index: int,
    ) -> list[Sample]:
        matrices = [k for k, i in enumerate(stats.indices) if dims[i] > 1]
        samples = self._samples(row.step, _Measured(stats, facts, matrices, factor, index), row.grad_norm, due)
        for sample in samples:
            sample.time = row.update_time
        return samples

    def _reported(self, row: StepRow) -> Iterable[Sample]:
        """As :meth:`_afterwards`."""
        index = row.optimizer_index
        if not row.over or row.skipped or row.grad_norm is None or self._given.get(index) == row.step:
            return ()
        self._given[index] = row.step
        return (Sample("grad_norm", row.step, row.grad_norm, optimizer_labels(index), time=row.time),)

    def _afterwards(self, event: Event, demand: Demand) -> Iterable[Sample]:
        """After the update gradients may be gone or belong to a skipped step; only these are sure: statistics of those
        that were used inside the backward pass, and the loop's own norm."""
        inner: InnerPass | None = event.inner_gradients
        if inner is not None and inner.step == event.step:
            self._given[event.optimizer_index] = event.step
            stats = inner.statistics
            facts = GradientFacts(stats, inner.names)
            measured = _Measured(stats, facts, _matrices(inner.parameters, stats), None, event.optimizer_index)
            return self._samples(event.step, measured, None, [key for key in self._besides if key in demand.due_now])
        norm = number(event.grad_norm) if not event.skipped else None
        if norm is None:
            return ()
        self._given[event.optimizer_index] = event.step
        return (Sample("grad_norm", event.step, norm, optimizer_labels(event.optimizer_index)),)

    def _samples(self, step: int, measured: _Measured, given: Any, besides: Sequence[str]) -> list[Sample]:
        """Of the statistics of one optimizer's gradients.

        :param given: the norm that the loop computed itself, or None.
        :param besides: what else is due.
        """
        stats, facts, matrices, factor, index = measured
        labels = optimizer_labels(index)
        norm = stats.total() if factor is None else stats.total() * factor
        known = type(norm) is float
        if not known or not math.isfinite(norm):
            # On a device nobody knows yet whether they are finite: the facts are kept either way, and cost nothing unread.
            self._recent.remember(step, facts)
        value = norm if given is None else _better_norm(given, norm)
        samples = [Sample("grad_norm", step, value, labels, detail=facts)]
        for key in besides:
            if key == "grads.zero":
                zero = calculate(facts.zero_count, stats.numbers, on_device=facts.zero_count_on_device)
                samples.append(Sample(key, step, zero, labels, detail=facts.zero))
            elif key == "grad_nonfinite":
                if stats.has("nonfinite"):
                    count = stats.number("nonfinite")
                elif known:
                    count = 0.0  # a finite norm proves it
                elif stats.nonfinite is not None:
                    count = stats.nonfinite
                else:
                    continue
                samples.append(Sample(key, step, count, labels, detail=facts))
            elif key == "grad_norm[]":
                for label, own in zip(self._family_labels(labels, facts.names), stats.row("norm"), strict=True):
                    value = own if factor is None else own * factor
                    samples.append(Sample("grad_norm", step, value, label, detail=facts))
            else:
                if len(matrices) > 1:
                    ends = stats.number("norm", matrices[0]), stats.number("norm", matrices[-1])
                    ratio = calculate(_layer_ratio, *ends)
                    if ratio is not None:
                        samples.append(Sample(key, step, ratio, labels))
        return samples

    def _family_labels(self, labels: Labels, names: list[str]) -> list[Labels]:
        """Labels of the per-parameter series, made once per set of parameters."""
        known = self._labels.get(labels)
        if known is None or known[0] != names:
            known = self._labels[labels] = (names, [with_label(labels, "parameter", name) for name in names])
        return known[1]


class _Measured(NamedTuple):
    """What was measured of the gradients of one optimizer."""

    stats: GradientStats
    facts: GradientFacts
    matrices: Sequence[int]
    """Which of the gradients are of weight matrices."""
    factor: Any
    """Takes clipping or a loss scale out of a norm; None where there is nothing to take out."""
    optimizer: int
    """Its index."""


def _matrices(params: Sequence[Any], stats: GradientStats) -> list[int]:
    return [k for k, i in enumerate(stats.indices) if params[i].dim() > 1]


def _to_undo(optimizer: Any, given: Any, max_norm: float | None) -> Any:
    """What gradients just before an update have to be multiplied with, or None.

    They are divided by the loss scale that a fused optimizer will take out itself, or else multiplied with what
    clipping took away; ``given`` is the loop's norm before clipping.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return quotient(1.0, number(scale))
    if given is None or max_norm is None:
        return None
    return calculate(_clipped_by, given, max_norm, on_device=_clipped_by_on_device)


def _clipped_by(norm: float, limit: float) -> float:
    """How many times smaller clipping made gradients of this norm; 1 where it left them alone."""
    ratio = (norm + 1e-6) / limit if limit else math.inf
    return ratio if math.isfinite(ratio) and ratio > 1.0 else 1.0


def _clipped_by_on_device(norm: Any, limit: float) -> Any:
    import torch

    ratio = (norm + 1e-6) / limit
    return torch.where(ratio.isfinite() & (ratio > 1.0), ratio, 1.0)


def _better_norm(given: Any, own: Any) -> Any:
    """The loop's norm, except where only its float32 overflowed."""
    return calculate(_finite_one, given, own, on_device=_finite_one_on_device)


def _finite_one(given: float, own: float) -> float:
    return own if not math.isfinite(given) and math.isfinite(own) else given


def _finite_one_on_device(given: Any, own: Any) -> Any:
    if isinstance(given, float):
        return given if math.isfinite(given) else own
    # Where neither is finite, neither keeps a bound, whichever of them it is. (isfinite() would be six launches.)
    return given if isinstance(own, float) else given.where(given.abs() < math.inf, own)


def _layer_ratio(first: float, last: float) -> float | None:
    return first / last if last > 0 else None
