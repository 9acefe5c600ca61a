"""The probe: hands out at the end of steps what the thread has read since."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck import Demand, Event, EventKind, Metric, Sample, StepRow

from healthcheck_nvml.cards import framework
from healthcheck_nvml.readings import READINGS
from healthcheck_nvml.watcher import Watcher, load

NEVER = sys.maxsize


class NvmlProbe:
    """Temperature, clocks, throttling, power, memory errors and utilisation of the NVIDIA cards that this process uses.

    A thread of its own reads them, once a second unless ``settings: {nvml.every: ...}`` says otherwise; a step only
    takes what is there. Without a rule that asks for one of them there is no thread. With several cards in a process
    the first has no label and the others ``device=1`` and so on, in the order in which they are used.
    """

    name = "nvml"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    noted: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = tuple(reading.metric for reading in READINGS)

    def __init__(self, get: Callable[[], Any] = load) -> None:
        self.every = 1.0
        self.rests_until = 0
        self.watcher: Watcher | None = None
        self._get = get
        self._wanted: tuple[str, ...] = ()
        self._taken = 0

    def plan(self, demand: Demand) -> None:
        self._wanted = tuple(metric.name for metric in self.provides if demand.wants(metric.key))

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        return self._samples(event.step, 0.0)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        return self._samples(rows[-1].step, rows[-1].time)

    def _samples(self, step: int, time: float) -> Sequence[Sample]:
        watcher = self.watcher
        if watcher is None:
            script = framework()
            if script is not None:  # the first step is over: whatever is trained on is in use by now
                self.watcher = Watcher(self._wanted, self.every, script, self._get).start()
            return ()
        if watcher.rounds == self._taken:
            if watcher.reason:
                self.rests_until = NEVER
            return ()
        self._taken = watcher.rounds
        return [
            Sample(
                name, step, value, (("device", str(device)),) if device else (), time=time, detail=self._detail(name)
            )
            for device, name, value in watcher.take()
        ]

    def _detail(self, name: str) -> Callable[[], Mapping[str, Any]] | None:
        if name != "nvml.xid" or self.watcher is None:
            return None
        watcher = self.watcher
        return lambda: {"xid": watcher.last_xid}

    def reason_without(self, key: str) -> str:
        """Why this run has no such metric."""
        if self.watcher is None:
            return ""
        return self.watcher.reason or self.watcher.missing.get(key, "")

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
