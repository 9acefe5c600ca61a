"""Running the probes that some rule wants, and no others; what they yield waits here to be judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from healthcheck.cadence import Cadence, Call
from healthcheck.dispatch import Dispatch
from healthcheck.engine.demand import RuleDemand
from healthcheck.events import Event, EventKind
from healthcheck.protocols import Probe
from healthcheck.references import weak
from healthcheck.samples import Sample, series_name

HISTORY = 200
"""Values per series kept for evidence."""
HISTORY_SERIES = 512


TIMED_EVERY = 7
"""Of so many steps one has its probes timed; a number that shares no factor with the usual ``every``."""
TIMED_FIRST = 20
"""Steps at the start that are timed one by one: they are not like those that follow."""


@dataclass(slots=True)
class ProbeCost:
    """Host time of one probe, for the report and the overhead budget: an estimate from the steps that were timed."""

    calls: int = 0
    ns: int = 0


class ProbeBoard:
    """The probes of one session.

    :param demand: what the rules want; probes that provide none of it are left out.
    :param active: seconds of active training, the time of every sample.
    """

    def __init__(
        self, probes: Mapping[str, Probe], demand: RuleDemand, dispatch: Dispatch, active: Callable[[], float]
    ) -> None:
        self.probes = probes
        self.demand = demand
        self.dispatch = dispatch
        self.active = active
        self.by_kind: dict[EventKind, list[Probe]] = {}
        self.cost: dict[str, ProbeCost] = {}
        self.pending: list[Sample] = []
        self._declared = {metric.key for probe in probes.values() for metric in probe.provides}
        self.device_time: Any = None
        """Measures the device time of what is launched here; the composition root puts it in."""
        self.measures_device = False
        self._step = -1
        self._steps = 0
        self._weight = 0
        """How many steps this one stands for in :attr:`cost`; 0: it is not timed."""
        self._cadence = Cadence(demand)
        self._now: Mapping[EventKind, Sequence[Call]] = {}
        self._resting: set[str] = set()
        """Probes that have nothing to do in this step. None while optimizers take turns, nor when one is new."""
        self._answered: set[tuple[str, int]] = set()
        """Probe and optimizer for which the present step was answered."""
        self._optimizers: dict[int, Callable[[], Any]] = {}
        self.plan()

    def plan(self) -> None:
        """Wire the wanted probes to their events."""
        self.by_kind = {}
        for name, probe in self.probes.items():
            if self.dispatch.is_quarantined(name) or not self._wanted(probe):
                continue
            self.cost.setdefault(name, ProbeCost())
            plan = getattr(probe, "plan", None)
            if plan is not None:
                try:
                    plan(self.demand)
                except (Exception, SystemExit) as error:
                    self.dispatch.failed(name, "plan", 0, error)
                    continue
            for kind in probe.listens_to:
                self.by_kind.setdefault(kind, []).append(probe)
        self.reschedule()

    def _wanted(self, probe: Probe) -> bool:
        """Whether some rule asks for a metric that this probe provides, by name or by prefix."""
        if any(self.demand.wants(metric.key) for metric in probe.provides):
            return True
        prefixes = tuple(getattr(probe, "provides_prefixes", ()))
        return (
            any(key not in self._declared and key.startswith(prefixes) for key in self.demand.every)
            if prefixes
            else False
        )

    # -- which probes look at which step ----------------------------------------------

    def reschedule(self) -> None:
        """``every`` of some metric changed: which probes look at which step is worked out anew."""
        self._cadence.wire(self.by_kind)
        self._step = -1

    def _begin_step(self, step: int) -> None:
        self._step = step
        self._steps += 1
        if self._answered:
            self._answered.clear()
        if self.device_time is not None:
            self.measures_device = not self._steps % self.device_time.every and self.device_time.measures()
        if self._steps <= TIMED_FIRST:
            self._weight = 1
        else:
            self._weight = 0 if self._steps % TIMED_EVERY else TIMED_EVERY
        plan = self._cadence.plan(step, rests=len(self._optimizers) < 2)
        self._now, self._resting = plan.calls, plan.resting(step)

    def looks_at(self, kind: EventKind, step: int) -> bool:
        """Whether any probe has something to do at this event of this step."""
        if step != self._step:
            self._begin_step(step)
        calls = self._now.get(kind)
        if not calls:
            return False
        resting = self._resting
        answered = self._answered if kind is EventKind.AFTER_UPDATE and len(self._optimizers) == 1 else ()
        for call in calls:
            if call.rester is not None and call.name in resting:
                continue
            # Most that listen after an update have had their answer before it.
            if call.once and (call.name, 0) in answered:
                continue
            return True
        return False

    def sample(self, event: Event, at: float) -> None:
        """Let every probe look that listens to this event; errors are kept with the probe's name.

        :param at: seconds of active training.
        """
        step = event.step
        if step != self._step:
            self._begin_step(step)
        if event.optimizer is not None:
            known = self._optimizers.get(event.optimizer_index)
            if known is None or known() is not event.optimizer:
                self._meet(event.optimizer, event.optimizer_index, step)
        calls = self._now.get(event.kind)
        if not calls:
            return
        demand, weight, answered, resting = self.demand, self._weight, self._answered, self._resting
        for call in calls:
            if call.rester is not None and call.name in resting:
                continue
            if call.fact and getattr(event, call.fact) is None:
                continue
            if call.once and (call.name, event.optimizer_index) in answered:
                continue
            began = perf_counter_ns() if weight else 0
            try:
                made = call.look(event, demand)
                if made:
                    pending = self.pending
                    for sample in made:
                        sample.time = at
                        pending.append(sample)
                    if call.once is not None:
                        answered.add((call.name, event.optimizer_index))
            except (Exception, SystemExit) as error:
                self.dispatch.failed(call.name, event.kind.value, event.step, error)
                if self.dispatch.is_quarantined(call.name):
                    self.plan()
            if weight:
                cost = self.cost[call.name]
                cost.calls += weight
                cost.ns += (perf_counter_ns() - began) * weight

    def _meet(self, optimizer: Any, index: int, step: int) -> None:
        """A new optimizer ends every rest: what probes knew of the old one says nothing of it."""
        self._optimizers[index] = weak(optimizer)
        self._now, self._resting = self._cadence.plan(step, rests=False).calls, set()

    def state_dict(self) -> dict[str, Any]:
        """What the probes must keep over a resume, by probe name."""
        wired = {p.name: p for listed in self.by_kind.values() for p in listed}
        return {name: p.state_dict() for name, p in wired.items() if hasattr(p, "state_dict")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Returns one sentence for every probe whose state cannot be read: it begins as if nothing had been."""
        told = []
        for name, state in saved.items():
            probe = self.probes.get(name)
            if probe is None or not hasattr(probe, "load_state_dict"):
                continue
            try:
                probe.load_state_dict(state)
            except Exception as error:  # whatever another version of a probe, or somebody's plugin, makes of it
                told.append(
                    f"the probe {name} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
                )
        return told

    def close(self, guard: Callable[[Callable[[], Any]], None]) -> None:
        for probe in {id(p): p for listed in self.by_kind.values() for p in listed}.values():
            close = getattr(probe, "close", None)
            if close is not None:
                guard(close)


class History:
    """The last values of every series, for evidence and for people who ask.

    Steps and values stand in turn in one deque: a pair for each would be one more thing for the garbage collector
    to count, and a loop that makes nothing of its own that stays would collect because of us.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}

    def remember(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            name = sample.metric if not sample.labels else series_name(sample.metric, sample.labels)
            kept = self._kept.get(name)
            if kept is None:
                if len(self._kept) >= HISTORY_SERIES:
                    continue
                kept = self._kept[name] = deque(maxlen=2 * HISTORY)
            kept.extend((sample.step, sample.value))

    def __call__(self, series: str, n: int = HISTORY) -> list[tuple[int, float]]:
        """The last ``n`` values of a series as ``(step, value)``, oldest first."""
        kept = list(self._kept.get(series, ()))
        return list(zip(map(int, kept[::2]), kept[1::2], strict=True))[-n:]

    def series(self) -> list[str]:
        """Names of all series, in the order in which they were first seen."""
        return list(self._kept)

    def newest(self, series: str) -> float | None:
        """The last value of a series; None without any."""
        kept = self._kept.get(series)
        return kept[-1] if kept else None

    def charted(self, leave_out: Iterable[str] = ()) -> dict[str, float]:
        """The newest value of each series without labels that makes a chart.

        What was seen once does not, nor do signs that have been 0 or 1 all along: forty flat lines hide the others.
        """
        out = set(leave_out)
        names = [name for name in self._kept if "[" not in name and name not in out]
        return {name: values[-1] for name in names if _varies(values := list(self._kept[name])[1::2])}


def _varies(values: Sequence[float]) -> bool:
    newest = values[-1] if values else 0.0
    return len(values) > 1 and (newest not in (0.0, 1.0) or any(value != newest for value in values))
