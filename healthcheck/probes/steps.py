"""Steps: signs of life, what became of their updates, and the time of each: per step and its parts, waiting for data, throughput
and progress, steps that get slower, and what watching itself costs."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.sampling import strided_view
from healthcheck.device.tensors import evenly, local_part, no_grad
from healthcheck.probes.graph import near
from healthcheck.probes.labels import optimizer_labels, where_called
from healthcheck.probes.looks import LOOK_EVERY, LOOK_SETTLED, next_look
from healthcheck.probes.memory_readings import waited_for_cpu

TENSORS = 8
"""Tensors looked at, spread over the model: a script may train one end of it only."""
PER_TENSOR = 16
"""Elements of each."""


class HandUpdates:
    """Compares weights that have gradients with what they were at the look before.

    Only for loops whose optimizer never steps: ``p.data.add_(p.grad, alpha=-lr)`` is training, too, and torch
    announces it neither by a hook nor by the version number of ``p``.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []
        """Each tensor, by weak reference, with its elements at the look before."""

    def changed(self, model: Any) -> Any:
        """Whether any of them changed since the last call.

        :param model: a :class:`healthcheck.core.protocols.ModelView`, just after a backward pass.
        :returns: 1 or 0, deferred where the weights are on a device; None if no weight has a gradient, so that there is
            nothing to apply.
        """
        there = [p for _, p in model.named_parameters() if p.grad is not None]
        if not there:
            return None
        # The last one always: who trains a head by hand trains the end of the model.
        chosen = [*evenly(there, TENSORS - 1), there[-1]]
        before, known = self._before, {id(tensor()): values for tensor, values in self._before}
        with no_grad():
            present = [(p, strided_view(local_part(p), PER_TENSOR).clone()) for p in dict.fromkeys(chosen)]
            self._before = [(weak(p), values) for p, values in present]
            # A NaN differs from itself, and would pass for a change.
            hits = [
                ((values != known[id(p)]) & (values == values)).any()
                for p, values in present
                if id(p) in known and known[id(p)].shape == values.shape
            ]
            if not hits:
                return float(bool(before))  # other tensors than before: the script made new ones
            found = hits[0]
            for hit in hits[1:]:
                found = found | hit.to(found.device)
            return number(found)


OFTEN = 0.2
"""Seconds in which one sign of life is enough."""


class HeartbeatProbe:
    """Says 1 whenever the run shows that it lives: training, evaluation, saving.

    One event of each phase of a step is enough, and one in a fifth of a second; the rest would only repeat it.
    """

    name = "heartbeat"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.EPOCH_START,
        EventKind.LOSS,
        EventKind.STEP_END,
        EventKind.EVAL_START,
        EventKind.EVAL_STEP,
        EventKind.EVAL_END,
        EventKind.TEST_START,
        EventKind.TEST_STEP,
        EventKind.TEST_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
    )
    noted = (EventKind.LOSS, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("heartbeat", "1 at every sign of life: a step, an evaluation batch, a checkpoint."),
    )

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        now = self._clock()
        if now - self._last < OFTEN:
            return ()
        self._last = now
        return (Sample("heartbeat", event.step, 1.0, phase=event.phase),)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made = []
        for row in rows:
            # The clock of events reads `time.monotonic`, too.
            last, step = self._last - row.origin, row.step
            for at in (*row.passes, row.time) if row.ends else row.passes:
                if at - last >= OFTEN:
                    last, self._last = at, at + row.origin
                    made.append(Sample("heartbeat", step, 1.0, time=at))
        return made


class StepCountProbe:
    """Counts backward passes against attempted updates.

    A step that a ``GradScaler`` skips was attempted. A step end without optimizer (a trainer that
    counts backward passes, because nothing ever steps) was not: there the weights decide. A loop that changes them by
    hand trains, and one whose gradients reach no weight has nothing to apply.
    """

    name = "step-count"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    noted = listens_to
    provides: tuple[Metric, ...] = (
        Metric("micro_batches", "Losses of the step: one for each backward pass, or the one that the loop reports."),
        Metric("updates.missing", "Backward passes since the last attempted update, or change of the weights."),
    )

    def __init__(self) -> None:
        self._passes = 0
        """Backward passes of the present step."""
        self._missing = 0.0
        """Backward passes of earlier steps whose update has not come."""
        self._by_hand: HandUpdates | None = None
        self._counts_passes = True

    def plan(self, demand: Demand) -> None:
        self._counts_passes = demand.wants("micro_batches")

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._passes += 1
            return ()
        passes, self._passes = self._passes, 0
        changed: Any = 0.0
        if event.optimizer is not None or event.skipped is not None:
            self._missing, self._by_hand = 0.0, None
            missing: Any = 0.0
        else:
            if event.model is not None:
                self._by_hand = self._by_hand or HandUpdates()
                changed = self._by_hand.changed(event.model)
            missing = calculate(partial(self._count, passes), 0.0 if changed is None else changed)
        place = {} if event.optimizer is not None else where_called(event, "backward")
        detail = (lambda: place) if place else None  # not the event: it holds on to the model
        samples = [Sample("updates.missing", event.step, missing, detail=detail)] if changed is not None else []
        if passes and self._counts_passes:
            samples.append(Sample("micro_batches", event.step, float(passes)))
        return samples

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made = []
        for row in rows:
            self._passes += len(row.passes)
            if not row.ends:
                continue
            passes, self._passes = self._passes, 0
            if row.attempted or row.skipped is not None:  # else only the weights could say
                self._missing, self._by_hand = 0.0, None
                made.append(Sample("updates.missing", row.step, 0.0, time=row.time))
            if passes and self._counts_passes:
                made.append(Sample("micro_batches", row.step, float(passes), time=row.time))
        return made

    def _count(self, passes: int, changed: float) -> float:
        """One step more without an optimizer: where the weights changed since the step before, what was missing has
        come, and only the pass just made waits for its update."""
        self._missing = 1.0 if changed else self._missing + passes
        return self._missing


# --------------------------------------------------------------------------------------------------
# Updates that a rule held back.


_FLOATS = {float}


class SkippedUpdateProbe:
    """Counts updates that were kept from the weights. Gives nothing where no rule may do that."""

    name = "skipped-updates"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    noted = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.skipped",
            "1 if a rule kept this update from being applied, else 0.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
        Metric(
            "updates.skipped_streak",
            "Updates in a row that rules kept from being applied.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
    )

    def __init__(self) -> None:
        self._streak: dict[int, float] = {}
        self._given = -1
        """The last step of which something was said: an event and a row may both show it."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.held_back or event.step == self._given:
            return ()
        self._given = event.step
        return self._samples(event.step, event.held_back, 0.0)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            held_back = row.held_back
            if not held_back or row.step == self._given:
                continue
            self._given = row.step
            flags = held_back.values()
            made_all = not any(self._streak.values()) and set(map(type, flags)) == _FLOATS and not any(flags)
            if made_all:  # nearly always so
                for index in held_back:
                    labels = optimizer_labels(index)
                    made.append(Sample("updates.skipped", row.step, 0.0, labels, time=row.time))
                    made.append(Sample("updates.skipped_streak", row.step, 0.0, labels, time=row.time))
            else:
                made += self._samples(row.step, held_back, row.time)
        return made

    def _samples(self, step: int, held_back: Mapping[int, Any], time: float) -> list[Sample]:
        samples: list[Sample] = []
        for index, given in held_back.items():
            flag, labels = given if type(given) is float else number(given), optimizer_labels(index)
            streak = calculate(partial(self._count, index), flag)
            samples.append(Sample("updates.skipped", step, flag, labels, time=time))
            samples.append(Sample("updates.skipped_streak", step, streak, labels, time=time))
        return samples

    def _count(self, index: int, flag: float) -> float:
        self._streak[index] = self._streak.get(index, 0.0) + 1.0 if flag else 0.0
        return self._streak[index]


# --------------------------------------------------------------------------------------------------
# Their time.


PAUSES = (
    EventKind.EVAL_START,
    EventKind.EVAL_STEP,
    EventKind.EVAL_END,
    EventKind.TEST_START,
    EventKind.TEST_STEP,
    EventKind.TEST_END,
    EventKind.CHECKPOINT_SAVED,
    EventKind.EPOCH_START,
    EventKind.EPOCH_END,
)
"""What may lie between two steps and is no part of either."""

ALWAYS = 5
"""Steps in a row with a pause before them, after which the pause is a part of each: evaluation of a whole graph after
every update, epochs of a single batch."""

ETA_WARMUP = 10
ETA_WINDOW = 20


class StepTimeProbe:
    """Seconds from the end of one step to the end of the next, and rates made of them.

    The first step (which compiles and allocates) gives no sample, nor does a step with an
    evaluation, a test, a checkpoint or an epoch's end before it: baselines stay clean. Where that is so for every
    step, it counts, or such a run would have no times at all. On an accelerator this is the host's time, which follows
    the device's over a few steps.
    """

    name = "step-time"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BATCH_READY, EventKind.STEP_END, *PAUSES)
    noted = (EventKind.BATCH_READY, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("time.step", "Seconds from step end to step end.", "s"),
        Metric("time.data", "Seconds that the step waited for its batches.", "s"),
        Metric("throughput", "Samples per second; steps per second where the batch size is unknown.", "1/s"),
        Metric("tokens_per_sec", "Tokens per second, where the trainer counts tokens.", "1/s"),
        Metric("progress", "Part of the planned steps that is done.", "fraction"),
        Metric("eta", f"Seconds to the end, from the median of {ETA_WINDOW} steps.", "s"),
    )

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._paused = False
        self._paused_in_a_row = 0
        self._wait: float | None = None
        self._samples = self._tokens = 0
        self._counts_samples = False
        self._recent: deque[float] = deque(maxlen=ETA_WINDOW)
        self._timed = 0
        self._step = 0
        self._wanted = frozenset(metric.key for metric in self.provides)
        self._untimed = (math.inf, math.inf)
        """Since when and until when the time was not the training's, the last time that it was not."""

    def plan(self, demand: Demand) -> None:
        self._wanted = frozenset(metric.key for metric in self.provides if demand.wants(metric.key))

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            if event.data_wait is not None:
                self._wait = (self._wait or 0.0) + event.data_wait
            self._samples += event.n_samples or 0
            self._tokens += event.n_tokens or 0
            return ()
        if event.kind is EventKind.TRAIN_START:
            self._last = None
            return ()
        if event.kind is not EventKind.STEP_END:
            self._paused = True
            return ()
        return self._samples_of([(event, self._clock())])

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        return self._samples_of([(row, row.time + row.origin) for row in rows if row.ends])

    def steps_left_out(self, last: int, now: float) -> None:
        """The next step is watched: its time counts from here."""
        self._last, self._paused = now, False
        self._wait, self._samples, self._tokens = None, 0, 0

    def untimed(self, since: float, until: float | None) -> None:
        self._untimed = (since, math.inf if until is None else until)

    def _samples_of(self, ended: Sequence[tuple[Event | StepRow, float]]) -> list[Sample]:
        """These steps are over, each at a reading of the clock."""
        samples: list[Sample] = []
        wanted = self._wanted
        for event, now in ended:
            step = event.step
            if step == self._step:  # a second optimizer's end of the same step
                continue
            self._step = step
            self._paused_in_a_row = self._paused_in_a_row + 1 if self._paused else 0
            # A run with a pause before every step would have no times at all.
            clean = not self._paused or self._paused_in_a_row > ALWAYS
            since, until = self._untimed
            if now >= since and (self._last is None or self._last < until):  # the clock of rows stands still at `since`
                clean = False
            taken = now - self._last if clean and self._last is not None else None
            self._last, self._paused = now, False
            wait = event.data_wait if event.data_wait is not None else self._wait
            count = event.n_samples if event.n_samples is not None else self._samples
            tokens = event.n_tokens if event.n_tokens is not None else self._tokens
            self._wait, self._samples, self._tokens = None, 0, 0
            self._counts_samples = self._counts_samples or count > 0
            time = getattr(event, "time", 0.0)
            if taken is not None and taken > 0:
                if "time.step" in wanted:
                    samples.append(Sample("time.step", step, taken, time=time))
                if wait is not None and "time.data" in wanted:
                    samples.append(Sample("time.data", step, wait, time=time))
                # One unit per run: a step without a count must not mix steps/s into samples/s.
                if (count > 0 or not self._counts_samples) and "throughput" in wanted:
                    samples.append(Sample("throughput", step, (count or 1) / taken, time=time))
                if tokens > 0 and "tokens_per_sec" in wanted:
                    samples.append(Sample("tokens_per_sec", step, tokens / taken, time=time))
                self._recent.append(taken)
                self._timed += 1
            if event.max_steps:
                if "progress" in wanted:
                    samples.append(Sample("progress", step, min(1.0, step / event.max_steps), time=time))
                if self._timed >= ETA_WARMUP and "eta" in wanted:
                    left = max(0, event.max_steps - step)
                    samples.append(Sample("eta", step, left * statistics.median(self._recent), time=time))
        return samples


class StepPartsProbe:
    """Where a step's time goes, by the host's clock between events.

    Kernels run late on an accelerator: there the parts say where the host waits, not where the
    device works.
    """

    name = "step-parts"
    listens_to: tuple[EventKind, ...] = (
        EventKind.BATCH_READY,
        EventKind.LOSS,
        EventKind.BACKWARD_END,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("time.forward", "Seconds from batch to loss, over all micro-batches.", "s"),
        Metric("time.backward", "Seconds from the last loss to the end of the backward pass.", "s"),
        Metric("time.optimizer", "Seconds in the optimizer's step.", "s"),
    )

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._at: dict[EventKind, float] = {}
        self._parts: dict[str, float] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.STEP_END:
            parts, self._parts, self._at = self._parts, {}, {}
            if event.run is not None and event.run.untimed:
                return ()
            return [Sample(f"time.{name}", event.step, seconds) for name, seconds in parts.items()]
        now = self._at[event.kind] = self._clock()
        if event.kind is EventKind.LOSS:
            self._add("forward", EventKind.BATCH_READY, now)
        elif event.kind is EventKind.BACKWARD_END:
            self._add("backward", EventKind.LOSS, now)
        elif event.kind is EventKind.AFTER_UPDATE:
            self._add("optimizer", EventKind.BEFORE_UPDATE, now)
        return ()

    def _add(self, part: str, since: EventKind, now: float) -> None:
        began = self._at.pop(since, None)
        if began is not None:
            self._parts[part] = self._parts.get(part, 0.0) + now - began


LOOKS = 6
"""Looks whose median is the pace: the first ones, without the very first, and the newest ones."""


class PaceProbe:
    """How the time per value of the loss has grown since the start.

    From the time between two looks is taken what the thread spent waiting for a processor: that is the machine's
    doing. The rest is divided by the largest number of values in the graph of the loss near its root (tokens times
    classes, say): longer sequences and larger batches take longer. Without such a graph it is the time alone.
    """

    name = "pace"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "time.pace",
            "How many times as long as at first a step takes for each value of its loss, waits for a processor left out.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self, clock: Callable[[], float] = perf_counter, waited: Callable[[], float] = waited_for_cpu) -> None:
        self._clock, self._waited = clock, waited
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=LOOKS)
        self._last: tuple[int, float] | None = None
        self._due = 1
        self._terms = 0
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.step < self._due:
            self.rests_until = self._due
            return ()
        if event.kind is EventKind.LOSS:
            self._terms = terms(event.loss_graph) if event.loss_graph is not None else 0
            return ()
        if event.run is not None and event.run.untimed:
            self._last = None
            return ()
        now, step = self._clock() - self._waited(), event.step
        last, self._last = self._last, (step, now)
        self._due = self.rests_until = next_look(step, LOOK_EVERY, LOOK_SETTLED)
        if last is None or step <= last[0]:
            return ()
        # Waits for a processor may be noted late by the kernel, and then exceed the time between two looks.
        pace = max(0.0, now - last[1]) / (step - last[0]) / (self._terms or 1)
        if len(self._first) <= LOOKS:
            self._first.append(pace)
        self._recent.append(pace)
        if len(self._first) <= LOOKS:
            return ()
        usual = median(self._first[1:])
        return (Sample("time.pace", step, median(self._recent) / usual),) if usual else ()


def terms(root: Any) -> int:
    """The largest number of values of a node near the root of a loss's graph."""
    largest = 1
    for node in near(root):
        for made in (node, node.next_functions[0][0] if node.next_functions else None):
            metadata = getattr(made, "_input_metadata", None)
            if metadata:
                largest = max(largest, math.prod(map(int, metadata[0].shape)))
    return largest


WINDOW = 50
"""Steps over which one value is taken: single steps are noise."""
WARMUP = 10
"""Steps that are left out at the start: they name parameters, compile kernels and fill tables."""


class OwnCostProbe:
    """Our own host time against the time of the training, one value in :data:`WINDOW` steps.

    Host time only: kernels that we launch are not in it. On an accelerator that is kept busy the host
    runs ahead, and the training loses less than this.
    """

    name = "own-cost"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "monitor.overhead",
            f"Host time of healthcheck itself as a share of the training time, over the last {WINDOW} steps.",
            "fraction",
        ),
    )

    def __init__(self) -> None:
        self._steps = 0
        self._before: tuple[float, float] | None = None
        self._first = 0
        """The step of the last value."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self._steps += 1
        if (self._steps - WARMUP) % WINDOW:
            return ()
        if event.run is None:
            return ()
        own, active = now = event.run.own_seconds, event.run.active_seconds
        before, self._before = self._before, now
        first, self._first = self._first, event.step
        if before is None or active <= before[1]:
            return ()
        share = (own - before[0]) / (active - before[1])
        facts = {"per_step": f"{(own - before[0]) / max(1, event.step - first) * 1e3:.2f} ms a step"}
        return (Sample("monitor.overhead", event.step, share, detail=lambda: facts),)
