"""The board of probes: which of them look at which event of a step, calling them, and the last values that came of it.

Only probes that some rule wants are on it. Of those, a step calls the ones that have something to do: a metric
that is due, and no pause. Most steps are like one before, so what was worked out for one is used again for all like it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Probe
from healthcheck.core.references import weak
from healthcheck.core.samples import Sample, series_name
from healthcheck.engine.routes import RuleDemand
from healthcheck.extend.dispatch import Dispatch

TIMED_EVERY = 7
"""Of so many steps one has its probes timed; a number that shares no factor with the usual ``every``."""
TIMED_FIRST = 20
"""Steps at the start that are timed one by one: they are not like those that follow."""

_PLANS = 256
"""Plans kept at most; rules with few ``every`` need a dozen."""


class DeviceTimer(Protocol):
    """Measures the device time of what is launched at an event, in one step of :attr:`every`."""

    every: int

    def measures(self) -> bool:
        """Whether a step can be measured now; counts it."""

    def begin(self) -> Callable[[], None] | None:
        """Start; the result is called at the end. None where it cannot be measured."""

    def seconds_per_step(self) -> float | None:
        """Mean over the measured steps; None while there is none."""


@dataclass(slots=True)
class ProbeCost:
    """Host time of one probe, for the report and the overhead budget: an estimate from the steps that were timed."""

    calls: int = 0
    ns: int = 0


_Key = tuple[str, int]
"""Name of a probe and index of an optimizer."""


@dataclass(slots=True)
class Call:
    """How one probe is called at one kind of event."""

    look: Callable[[Event, RuleDemand], Iterable[Sample]]
    name: str
    first: _Key
    """The probe, for the first optimizer."""
    fact: str
    """A fact of the event without which it is not called; empty: none."""
    once: bool | None
    """Whether it is not called again once it has answered. None: its answers are not noted."""
    pauses: bool
    """Whether it says at times that it has nothing to do for a while (``rests_until``)."""
    marks: int
    """Bits of the schedule at which it has something to do; 0: always."""


@dataclass(slots=True)
class StepPlan:
    """What all steps have in common in which the same is due."""

    calls: Mapping[EventKind, Sequence[Call]]
    due: frozenset[str]
    """Keys of the metrics that are due."""
    pausing: Sequence[tuple[Any, _Key]]
    """Probes among the called that pause at times."""
    kinds: frozenset[EventKind]
    """Kinds at which somebody is called who never pauses."""
    unless_paused: Sequence[tuple[EventKind, frozenset[_Key]]]
    """Kinds at which nobody is called if all of these pause."""
    after_update: tuple[frozenset[_Key], frozenset[_Key]] | None
    """So that nobody is left to call after the update: who has to pause, and who has to pause or to have answered
    before it. None: somebody always is."""


class ProbeBoard:
    """The probes of one session.

    :param demand: what the rules want; probes that provide none of it are left out.
    :param dispatch: keeps the errors of probes, and knows which are in quarantine.
    :param device_time: measures what is launched here; None: nothing does.
    """

    def __init__(
        self,
        probes: Mapping[str, Probe],
        demand: RuleDemand,
        dispatch: Dispatch,
        device_time: DeviceTimer | None = None,
    ) -> None:
        self.probes = probes
        self.by_kind: dict[EventKind, list[Probe]] = {}
        """The wanted probes, by the events that they listen to, due or not."""
        self.wanted: set[EventKind] = set()
        """Kinds of event that are worth building in the step at hand. Always this same set: adapters look into it."""
        self.cost: dict[str, ProbeCost] = {}
        self.device_time = device_time
        self.measures_device = False
        """Whether device time is measured in this step."""
        self._demand = demand
        self._dispatch = dispatch
        self._declared = {metric.key for probe in probes.values() for metric in probe.provides}
        self._elsewhere: frozenset[EventKind] = frozenset()
        self._closed = False
        self._step = -1
        self._steps = 0
        self._weight = 0
        """How many steps this one stands for in :attr:`cost`; 0: it is not timed."""
        self._marks: list[tuple[int, int, int]] = []
        """``(every, ahead, bit)``: hit where ``step + ahead`` is a multiple of ``every``."""
        self._bits: dict[tuple[int, int], int] = {}
        self._calls: dict[EventKind, list[Call]] = {}
        """All calls, due or not."""
        self._plans: dict[int, StepPlan] = {}
        """By the marks that a step hits."""
        self._plan = StepPlan({}, frozenset(), (), frozenset(), (), None)
        """Of the step at hand."""
        self._paused: set[_Key] = set()
        """Who has nothing to do in this step."""
        self._answered: set[_Key] = set()
        """For whom the step at hand was answered."""
        self._optimizers: dict[int, Callable[[], Any]] = {}
        self.plan()

    # -- which probes there are ---------------------------------------------------------

    def plan(self) -> None:
        """Wire the wanted probes to their events: at the start, and when the demand has changed."""
        self.by_kind = {}
        for name, probe in self.probes.items():
            if self._dispatch.is_quarantined(name) or not self._wants(probe):
                continue
            self.cost.setdefault(name, ProbeCost())
            plan = getattr(probe, "plan", None)
            if plan is not None:
                try:
                    plan(self._demand)
                except (Exception, SystemExit) as error:
                    self._dispatch.failed(name, "plan", 0, error)
                    continue
            for kind in probe.listens_to:
                self.by_kind.setdefault(kind, []).append(probe)
        self.reschedule()

    def _wants(self, probe: Probe) -> bool:
        """Whether some rule asks for a metric that this probe provides, by name or by prefix."""
        if any(self._demand.wants(metric.key) for metric in probe.provides):
            return True
        prefixes = tuple(getattr(probe, "provides_prefixes", ()))
        return bool(prefixes) and any(
            key not in self._declared and key.startswith(prefixes) for key in self._demand.every
        )

    def heard_elsewhere(self, kinds: frozenset[EventKind]) -> None:
        """These kinds are wanted for other reasons too, in every step: somebody listens, samples are judged there."""
        self._elsewhere = kinds
        self.wanted.clear()
        self.wanted.update(kinds, self.by_kind)

    def reschedule(self) -> None:
        """``every`` of some metric, or the probes themselves, have changed: plan all steps anew."""
        wired = {id(p): p for listed in self.by_kind.values() for p in listed}.values()
        schedules = {probe.name: self._schedule_of(probe) for probe in wired}
        known = {mark for marks in schedules.values() for mark in marks}
        known |= {(self._demand.every_of(key), 0) for key in self._demand.every} - {(1, 0)}
        self._marks = [(every, ahead, 1 << n) for n, (every, ahead) in enumerate(sorted(known))]
        self._bits = {(every, ahead): bit for every, ahead, bit in self._marks}

        def call(probe: Probe, kind: EventKind) -> Call:
            once = getattr(probe, "answers_once", ())
            due = kind in getattr(probe, "only_when_due", ())
            return Call(
                look=probe.sample,
                name=probe.name,
                first=(probe.name, 0),
                fact=getattr(probe, "only_with", ""),
                once=kind in once if once else None,
                pauses=hasattr(probe, "rests_until"),
                marks=sum(self._bits[mark] for mark in schedules[probe.name]) if due else 0,
            )

        self._calls = {kind: [call(p, kind) for p in listed] for kind, listed in self.by_kind.items()}
        self._plans.clear()
        self._step = -1
        self.heard_elsewhere(self._elsewhere)

    def _schedule_of(self, probe: Probe) -> set[tuple[int, int]]:
        """``(every, ahead)``: a probe has something to do where ``step + ahead`` is a multiple; empty: always."""
        if not getattr(probe, "only_when_due", ()):
            return set()
        everies = {self._demand.every_of(m.key) for m in probe.provides if self._demand.wants(m.key)}
        if 1 in everies:
            return set()
        return {(every, ahead) for every in everies for ahead in range(getattr(probe, "steps_ahead", 0) + 1)}

    # -- which of them look at a step -----------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Work out who is called at which event of this step. Once per step, before its first event.

        This is on the step path: what can be known for many steps is in the plan, and the rest is a few short loops.
        """
        if self._closed:
            return
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
        hit = 0
        for every, ahead, bit in self._marks:
            if not (step + ahead) % every:
                hit |= bit
        plan = self._plans.get(hit)
        if plan is None:
            plan = self._planned(hit)
        self._plan = plan
        self._demand.due_now = plan.due
        paused = self._paused
        paused.clear()
        if len(self._optimizers) < 2:  # where optimizers take turns, what is known of one says nothing of the next
            for probe, key in plan.pausing:
                if probe.rests_until > step:
                    paused.add(key)
        wanted = self.wanted
        wanted.clear()
        wanted.update(self._elsewhere, plan.kinds)
        for kind, keys in plan.unless_paused:
            if not keys <= paused:
                wanted.add(kind)

    def _planned(self, hit: int) -> StepPlan:
        """The plan of all steps that hit these marks."""
        demand, bits = self._demand, self._bits
        calls: dict[EventKind, list[Call]] = {}
        for kind, listed in self._calls.items():
            chosen = [call for call in listed if not call.marks or call.marks & hit]
            if chosen:
                calls[kind] = chosen
        due = set()
        for key in demand.every:
            bit = bits.get((demand.every_of(key), 0))
            if bit is None or bit & hit:  # no bit: at every step
                due.add(key)
        pausing = {call.name: call.first for listed in calls.values() for call in listed if call.pauses}
        at_times = {kind for kind, listed in calls.items() if all(call.pauses for call in listed)}
        after = calls.get(EventKind.AFTER_UPDATE, [])
        after_update = None
        if all(call.once or call.pauses for call in after):
            must_pause = frozenset(call.first for call in after if not call.once)
            may_answer = frozenset(call.first for call in after if call.once)
            after_update = must_pause, may_answer
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[hit] = StepPlan(
            calls,
            frozenset(due),
            [(self.probes[name], key) for name, key in pausing.items()],
            frozenset(calls.keys() - at_times),
            [(kind, frozenset(call.first for call in calls[kind])) for kind in at_times],
            after_update,
        )
        return plan

    def looks_at(self, kind: EventKind, step: int) -> bool:
        """Whether an event of this step is worth building."""
        if step != self._step:
            self.begin_step(step)
        return kind in self.wanted

    # -- calling them -----------------------------------------------------------------------

    def sample(self, event: Event, at: float, into: list[Sample]) -> None:
        """Let every probe look that has something to do at this event.

        Errors are kept with the probe's name; after three a probe is left out.

        :param at: seconds of active training, the time of every sample.
        :param into: takes the samples.
        """
        step, kind, index = event.step, event.kind, event.optimizer_index
        if step != self._step:
            self.begin_step(step)
            # Nobody announced this step, so nobody knows which events of it are worth building: all that may be.
            self.wanted.update(self.by_kind)
        if event.optimizer is not None:
            known = self._optimizers.get(index)
            if known is None or known() is not event.optimizer:
                self._meet(event.optimizer, index)
        calls = self._plan.calls.get(kind)
        if calls is None:
            return
        demand, weight, answered, paused = self._demand, self._weight, self._answered, self._paused
        for call in calls:
            if call.pauses and call.first in paused:
                continue
            if call.fact and getattr(event, call.fact) is None:
                continue
            if call.once and (call.name, index) in answered:
                continue
            began = perf_counter_ns() if weight else 0
            try:
                made = call.look(event, demand)
                if made:
                    for sample in made:
                        sample.time = at
                        into.append(sample)
                    if call.once is not None:
                        answered.add((call.name, index))
            except (Exception, SystemExit) as error:
                self._dispatch.failed(call.name, kind.value, step, error)
                if self._dispatch.is_quarantined(call.name):
                    self.plan()
            if weight:
                cost = self.cost[call.name]
                cost.calls += weight
                cost.ns += (perf_counter_ns() - began) * weight
        if kind is EventKind.BEFORE_UPDATE and len(self._optimizers) == 1:
            # Most that listen after an update have had their answer before it: then that event need not be built.
            after = self._plan.after_update
            if after is not None and EventKind.AFTER_UPDATE not in self._elsewhere:
                must_pause, may_answer = after
                if must_pause <= paused and may_answer <= answered | paused:
                    self.wanted.discard(EventKind.AFTER_UPDATE)

    def _meet(self, optimizer: Any, index: int) -> None:
        """A new optimizer ends every pause: what probes knew of the old one says nothing of it."""
        self._optimizers[index] = weak(optimizer)
        self._paused.clear()
        self.wanted.update(self._plan.calls)

    def steps_left_out(self, steps: int, last: int) -> None:
        """Nobody looked at some steps, up to and including ``last``; the next is watched. Between the two."""
        self._step = -1
        for probe in {id(p): p for listed in self.by_kind.values() for p in listed}.values():
            missed = getattr(probe, "steps_left_out", None)
            if missed is not None:
                try:
                    missed(steps, last)
                except (Exception, SystemExit) as error:
                    self._dispatch.failed(probe.name, "steps_left_out", last, error)

    # -- resume and end -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the probes must keep over a resume, by probe name."""
        wired = {p.name: p for listed in self.by_kind.values() for p in listed}
        return {name: p.state_dict() for name, p in wired.items() if hasattr(p, "state_dict")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Returns one sentence for every probe whose state cannot be read: it begins as if nothing had been."""
        fresh = []
        for name, state in saved.items():
            probe = self.probes.get(name)
            if probe is None or not hasattr(probe, "load_state_dict"):
                continue
            try:
                probe.load_state_dict(state)
            except Exception as error:  # whatever another version of a probe, or somebody's plugin, makes of it
                fresh.append(
                    f"the probe {name} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
                )
        return fresh

    def close(self, guard: Callable[[Callable[[], Any]], None]) -> None:
        """The run is over: nothing is wanted any more.

        :param guard: calls a function and keeps its error.
        """
        self._closed = True
        self.wanted.clear()
        for probe in {id(p): p for listed in self.by_kind.values() for p in listed}.values():
            close = getattr(probe, "close", None)
            if close is not None:
                guard(close)


HISTORY = 200
"""Values per series that :class:`History` keeps."""
HISTORY_SERIES = 512


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
