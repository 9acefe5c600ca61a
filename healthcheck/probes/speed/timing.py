"""Time per step, waiting for data, throughput, and how far the run is."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

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
    provides: tuple[Metric, ...] = (
        Metric("time.step", "Seconds from step end to step end.", "s"),
        Metric("time.data", "Seconds that the step waited for its batches.", "s"),
        Metric("throughput", "Samples per second; steps per second where the batch size is unknown.", "1/s"),
        Metric("tokens_per_sec", "Tokens per second, where the trainer counts tokens.", "1/s"),
        Metric("progress", "Part of the planned steps that is done.", "fraction"),
        Metric("eta", f"Seconds to the end, from the median of {ETA_WINDOW} steps.", "s"),
    )

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
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
        if event.step == self._step:  # a second optimizer's end of the same step
            return ()
        self._step = event.step
        now = self._clock()
        self._paused_in_a_row = self._paused_in_a_row + 1 if self._paused else 0
        clean = not self._paused or self._paused_in_a_row > ALWAYS
        taken = now - self._last if clean and self._last is not None else None
        self._last, self._paused = now, False
        return self._samples_of(event, taken, demand)

    def _samples_of(self, event: Event, taken: float | None, demand: Demand) -> list[Sample]:
        step, wanted = event.step, demand.wants
        wait = event.data_wait if event.data_wait is not None else self._wait
        count = event.n_samples if event.n_samples is not None else self._samples
        tokens = event.n_tokens if event.n_tokens is not None else self._tokens
        self._wait, self._samples, self._tokens = None, 0, 0
        self._counts_samples = self._counts_samples or count > 0
        samples = []
        if taken is not None and taken > 0:
            if wanted("time.step"):
                samples.append(Sample("time.step", step, taken))
            if wait is not None and wanted("time.data"):
                samples.append(Sample("time.data", step, wait))
            # One unit per run: a step without a count must not mix steps/s into samples/s.
            if (count > 0 or not self._counts_samples) and wanted("throughput"):
                samples.append(Sample("throughput", step, (count or 1) / taken))
            if tokens > 0 and wanted("tokens_per_sec"):
                samples.append(Sample("tokens_per_sec", step, tokens / taken))
            self._recent.append(taken)
            self._timed += 1
        if event.max_steps:
            if wanted("progress"):
                samples.append(Sample("progress", step, min(1.0, step / event.max_steps)))
            if self._timed >= ETA_WARMUP and wanted("eta"):
                left = max(0, event.max_steps - step)
                samples.append(Sample("eta", step, left * statistics.median(self._recent)))
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
