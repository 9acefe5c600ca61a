"""Memory at the points of the loop, and what an epoch or a step did to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from healthcheck.events import Event, EventKind
from healthcheck.probes.memory.device import TorchDevice
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

EPOCH_METRICS = (
    "memory.epoch",
    "memory.epoch_start",
    "memory.epoch_end",
    "memory.epoch_peak",
    "memory.epoch_delta",
    "memory.epoch_cleanups",
    "memory.epoch_began",
    "memory.epoch_ended",
)


class MemoryEpochProbe:
    """One line of memory per epoch, at its end. Needs a trainer that announces epochs.

    The peak is that of the allocator where it rose during the epoch, else the highest value at a
    step's end; the allocator's counters are not reset, they belong to the script.
    """

    name = "memory-epochs"
    listens_to: tuple[EventKind, ...] = (
        EventKind.EPOCH_START,
        EventKind.STEP_END,
        EventKind.EVAL_END,
        EventKind.EPOCH_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("memory.epoch", "Number of the epoch that has ended, from 0.", cost=Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_start", "Memory at the start of the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_end", "Memory at the end of the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_peak", "Highest memory within the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric(
            "memory.epoch_delta",
            "Memory at the end of the epoch less that at its start.",
            "bytes",
            Cost.HOST,
            needs=("epochs",),
        ),
        Metric("memory.epoch_cleanups", "Cleanups that ran within the epoch.", cost=Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_began", "When the epoch began, in seconds since 1970.", "s", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_ended", "When the epoch ended, in seconds since 1970.", "s", Cost.HOST, needs=("epochs",)),
    )

    def __init__(self, device: TorchDevice | None = None, clock: Callable[[], float] = time.time) -> None:
        self.device = device or TorchDevice()
        self._clock = clock
        self._start: int | None = None
        self._began = 0.0
        self._epoch: float | None = None
        self._highest = 0
        self._peak_before = 0
        self._cleanups_before = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        stats = self.device.statistics()
        used = stats.get("allocated")
        if used is None:
            return ()
        peak = stats.get("peak", used)
        cleanups = event.run.actions_done.get("cleanup", 0) if event.run is not None else 0
        if event.kind is EventKind.EPOCH_START:
            self._start, self._began, self._highest = used, self._clock(), used
            self._peak_before, self._cleanups_before, self._epoch = peak, cleanups, event.epoch
            return ()
        if self._start is None:
            return ()
        self._highest = max(self._highest, used)
        if event.kind is not EventKind.EPOCH_END:
            return ()
        start, self._start = self._start, None
        values: dict[str, float] = {
            "memory.epoch_start": start,
            "memory.epoch_end": used,
            "memory.epoch_peak": peak if peak > self._peak_before else self._highest,
            "memory.epoch_delta": used - start,
            "memory.epoch_cleanups": cleanups - self._cleanups_before,
            "memory.epoch_began": self._began,
            "memory.epoch_ended": self._clock(),
        }
        if self._epoch is not None:
            values["memory.epoch"] = self._epoch
        return [Sample(name, event.step, float(value)) for name, value in values.items()]


class MemoryEventProbe:
    """Memory at every event of the loop. One call to the allocator each; only where a rule asks for it."""

    name = "memory-events"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.EPOCH_START,
        EventKind.STEP_START,
        EventKind.STEP_END,
        EventKind.EVAL_START,
        EventKind.EVAL_STEP,
        EventKind.EVAL_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
        EventKind.TRAIN_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("memory.at", "Memory held at one kind of event.", "bytes", Cost.HOST, labels=("event",)),
        Metric("memory.step_growth", "Memory at the end of a step less that at its start.", "bytes", Cost.HOST),
    )

    def __init__(self, device: TorchDevice | None = None) -> None:
        self.device = device or TorchDevice()
        self._at_start: int | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        used = self.device.statistics().get("allocated")
        if used is None:
            return ()
        samples = []
        if demand.wants("memory.at[]"):
            phase = event.phase
            samples.append(Sample("memory.at", event.step, float(used), (("event", event.kind.value),), phase))
        if event.kind is EventKind.STEP_START:
            self._at_start = used
        elif event.kind is EventKind.STEP_END and self._at_start is not None:
            samples.append(Sample("memory.step_growth", event.step, float(used - self._at_start)))
            self._at_start = None
        return samples
