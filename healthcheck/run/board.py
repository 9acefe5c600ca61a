"""The board of probes: which of them look at which event of a step, calling them, and the last values that came of it.

Only probes that some rule wants are on it. Of those, a step calls the ones that have something to do: a metric
that is due, and no pause. Most steps are like one before, so what was worked out for one is used again for all like it.

Probes hear of a step in one of two ways. By *events*, each at its moment: that is what :meth:`ProbeBoard.sample` does, and
what every probe can take. Or by a *row*, in which whoever trains has noted what the step came to: probes with
``sample_rows`` are asked about all rows that wait, at once, when somebody needs their samples
(:meth:`ProbeBoard.take_rows`). A step in which no other probe has anything to do makes no event at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Probe
from healthcheck.core.references import weak
from healthcheck.core.rows import StepRow, Update, UsedBatch
from healthcheck.core.samples import Sample, arrived
from healthcheck.engine.routes import RuleDemand
from healthcheck.extend.dispatch import Dispatch
from healthcheck.extend.guard import calls_foreign, describe, passes_on
from healthcheck.rulelang.rule import SETTLED

TIMED_EVERY = 7
"""Of so many steps one has its probes timed; a number that shares no factor with the usual ``every``."""
TIMED_FIRST = 20
"""Steps at the start that are timed one by one: they are not like those that follow."""

_STEP = operator.attrgetter("step")
SELDOM = {(EventKind.STEP_END, "loads"), (EventKind.STEP_END, "metrics"), (EventKind.BATCH_READY, "worker_draws")}
"""Facts for which alone an event is built: most steps have none of them."""
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
    pauses: str
    """The attribute in which it says that it has nothing to do for a while; empty: it never does."""
    marks: int
    """Bits of the schedule at which it has something to do; 0: always."""
    seldom: bool
    """Whether :attr:`fact` is there so seldom that whoever builds the event looks for it."""


@dataclass(slots=True)
class RowCall:
    """How one probe is asked about rows."""

    ask: Callable[[Sequence[StepRow], RuleDemand], Iterable[Sample]]
    name: str
    early: bool
    """Whether it can answer before the update is made."""


@dataclass(slots=True)
class StepPlan:
    """What all steps have in common in which the same is due."""

    calls: Mapping[EventKind, Sequence[Call]]
    due: frozenset[str]
    """Keys of the metrics that are due."""
    pausing: Sequence[tuple[Any, str, _Key]]
    """Probes among the called that pause at times."""
    kinds: frozenset[EventKind]
    """Kinds at which somebody is called who never pauses."""
    unless_paused: Sequence[tuple[EventKind, frozenset[_Key]]]
    """Kinds at which nobody is called if all of these pause."""
    after_update: tuple[frozenset[_Key], frozenset[_Key]] | None
    """So that nobody is left to call after the update: who has to pause, and who has to pause or to have answered
    before it. None: somebody always is."""
    rows: bool
    """Whether the step is noted in rows, so that nobody need be called who hears of it from them."""


def _noted(probe: Probe) -> tuple[EventKind, ...]:
    """Kinds of event that rows spare a probe."""
    return getattr(probe, "noted", ()) if hasattr(probe, "sample_rows") else ()


def _rest_of(probe: Probe, rows: bool) -> str:
    """The attribute in which a probe says until when it wants no events."""
    if rows and hasattr(probe, "events_from"):
        return "events_from"
    return "rests_until" if hasattr(probe, "rests_until") else ""


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
        self.rows: list[StepRow] = []
        """Rows that are finished and that probes have not been asked about. Whoever trains adds to it."""
        self.noted_until = 0.0
        """Time of the newest finished row: seconds of active training."""
        self.quiet_from = self.busy_at = 0
        """Between these two steps nothing is due: where they are noted in rows, :meth:`begin_step` may be left out."""
        self.open_row: StepRow | None = None
        """The row of the update at hand, once its gradients are final, until it is finished."""
        self.looks: list[tuple[str, Callable[[StepRow, Update], None]]] = []
        """Who looks at every update of a step that is noted in rows, with the name of the probe; below, at every batch."""
        self.batch_looks: list[tuple[str, Callable[[StepRow, UsedBatch], None]]] = []
        self._row_calls: list[RowCall] = []
        self._made: list[Sample] = []
        """Samples of rows that were asked for before anybody took them."""
        self._elsewhere: frozenset[EventKind] = frozenset()
        self._heard: frozenset[EventKind] = frozenset()
        self._closed = False
        self._step = -1
        self._steps = 0
        self._weight = 0
        """How many steps this one stands for in :attr:`cost`; 0: it is not timed."""
        self._marks: list[tuple[int, int, int]] = []
        """``(every, ahead, bit)``: hit where ``step + ahead`` is a multiple of ``every``."""
        self._bits: dict[tuple[int, int], int] = {}
        self._calls: dict[bool, dict[EventKind, list[Call]]] = {}
        """All calls, due or not, by whether the step is noted in rows."""
        self._plans: dict[tuple[int, bool], StepPlan] = {}
        """By the marks that a step hits, and whether it is noted in rows."""
        self._plan = StepPlan({}, frozenset(), (), frozenset(), (), None, False)
        """Of the step at hand."""
        self._paused: set[_Key] = set()
        """Who has nothing to do in this step."""
        self._answered: set[_Key] = set()
        """For whom the step at hand was answered."""
        self.optimizers: dict[int, Callable[[], Any]] = {}
        """Those that have stepped, by index, as weak references."""
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
                except BaseException as error:
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

    def reads(self, kind: EventKind, fact: str) -> bool:
        """Whether anybody looks at this field of such events, so that it is worth being worked out: a probe says so
        (``only_with``), and who listens by a hook may look at all of them."""
        probes = self.by_kind.get(kind, ())
        return bool(self._dispatch.table.get(kind)) or any(getattr(p, "only_with", "") == fact for p in probes)

    def heard_elsewhere(self, kinds: frozenset[EventKind], heard: frozenset[EventKind] = frozenset()) -> None:
        """These kinds are wanted for other reasons too, in every step: somebody listens, samples are judged there.

        :param heard: those of them that are wanted although the step is noted in rows.
        """
        self._elsewhere, self._heard = kinds, heard
        self.wanted.clear()
        self.wanted.update(kinds, self.by_kind)
        self._step, self.busy_at = -1, 0

    def reschedule(self) -> None:
        """``every`` of some metric, or the probes themselves, have changed: plan all steps anew."""
        self.catch_up()
        wired = {id(p): p for listed in self.by_kind.values() for p in listed}.values()
        schedules = {probe.name: self._schedule_of(probe) for probe in wired}
        known = {mark for marks in schedules.values() for mark in marks}
        known |= {(self._demand.every_of(key), 0) for key in self._demand.every} - {(1, 0)}
        self._marks = [(every, ahead, 1 << n) for n, (every, ahead) in enumerate(sorted(known))]
        self._bits = {(every, ahead): bit for every, ahead, bit in self._marks}

        def call(probe: Probe, kind: EventKind, rows: bool) -> Call:
            once = getattr(probe, "answers_once", ())
            due = kind in getattr(probe, "only_when_due", ())
            return Call(
                look=probe.sample,
                name=probe.name,
                first=(probe.name, 0),
                fact=getattr(probe, "only_with", ""),
                once=kind in once if once else None,
                pauses=_rest_of(probe, rows),
                marks=sum(self._bits[mark] for mark in schedules[probe.name]) if due else 0,
                seldom=(kind, getattr(probe, "only_with", "")) in SELDOM,
            )

        for rows in (False, True):
            self._calls[rows] = calls = {}
            for kind, listed in self.by_kind.items():
                hear = [p for p in listed if not (rows and kind in _noted(p))]
                if hear:
                    calls[kind] = [call(probe, kind, rows) for probe in hear]
        self._plans.clear()
        self._row_calls, self.looks, self.batch_looks = [], [], []
        for probe in wired:
            if hasattr(probe, "sample_rows") and not getattr(probe, "idle", False):
                early = EventKind.BEFORE_UPDATE in _noted(probe)
                self._row_calls.append(RowCall(probe.sample_rows, probe.name, early))
                if hasattr(probe, "look"):
                    self.looks.append((probe.name, probe.look))
                if hasattr(probe, "look_at_batch"):
                    self.batch_looks.append((probe.name, probe.look_at_batch))
        self.heard_elsewhere(self._elsewhere, self._heard)

    def _schedule_of(self, probe: Probe) -> set[tuple[int, int]]:
        """``(every, ahead)``: a probe has something to do where ``step + ahead`` is a multiple; empty: always."""
        if not getattr(probe, "only_when_due", ()):
            return set()
        everies = {self._demand.every_of(m.key) for m in probe.provides if self._demand.wants(m.key)}
        if 1 in everies:
            return set()
        return {(every, ahead) for every in everies for ahead in range(getattr(probe, "steps_ahead", 0) + 1)}

    # -- which of them look at a step -----------------------------------------------------

    def begin_step(self, step: int, rows: bool = False) -> None:
        """Work out who is called at which event of this step. Once per step, before its first event.

        :param rows: the step is noted in rows. Events of it say so.

        This is on the step path: what can be known for many steps is in the plan, and the rest is a few short loops.
        """
        if self._closed:
            return
        quiet = step - self._step if self.quiet_from <= self._step < step < self.busy_at + TIMED_EVERY else 1
        self._step = step
        self._steps += quiet
        if self._steps >= SETTLED and not self._demand.has_settled and self._demand.settle():
            self.reschedule()
            self._step = step
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
        plan = self._plans.get((hit, rows))
        if plan is None:
            plan = self._planned(hit, rows)
        self._plan = plan
        self._demand.due_now = plan.due
        paused = self._paused
        paused.clear()
        if len(self.optimizers) < 2:  # where optimizers take turns, what is known of one says nothing of the next
            for probe, rest, key in plan.pausing:
                if getattr(probe, rest) > step:
                    paused.add(key)
        wanted = self.wanted
        wanted.clear()
        wanted.update(self._heard if rows else self._elsewhere, plan.kinds)
        for kind, keys in plan.unless_paused:
            if not keys <= paused:
                wanted.add(kind)
        self.quiet_from, self.busy_at = step, 0
        if rows and not hit and not self._weight and not self.measures_device and len(wanted) == len(self._heard):
            self.busy_at = self._next_busy(step, plan)

    def _next_busy(self, step: int, plan: StepPlan) -> int:
        """The first step after this quiet one that is not like it."""
        busy = step + TIMED_EVERY - self._steps % TIMED_EVERY
        if self.device_time is not None:
            busy = min(busy, step + self.device_time.every - self._steps % self.device_time.every)
        for every, ahead, _ in self._marks:
            busy = min(busy, step + every - (step + ahead) % every)
        if len(self.optimizers) < 2:
            for probe, rest, _ in plan.pausing:
                until = getattr(probe, rest)
                if until > step:
                    busy = min(busy, until)
        return busy

    def look_closely(self) -> None:
        """Something happens in the step at hand: those are asked who otherwise hear of it from its row, while it is there
        to be seen, and the events are built at which rules are judged."""
        self.busy_at = 0
        for probe, rest, key in self._plan.pausing:
            if rest == "events_from":
                self._paused.discard(key)
                self.wanted.update(kind for kind in probe.listens_to if kind in self._plan.calls)
        self.wanted.update(self._elsewhere)

    def _planned(self, hit: int, rows: bool) -> StepPlan:
        """The plan of all steps that hit these marks."""
        demand, bits = self._demand, self._bits
        calls: dict[EventKind, list[Call]] = {}
        for kind, listed in self._calls[rows].items():
            chosen = [call for call in listed if not call.marks or call.marks & hit]
            if chosen:
                calls[kind] = chosen
        due = set()
        for key in demand.every:
            bit = bits.get((demand.every_of(key), 0))
            if bit is None or bit & hit:  # no bit: at every step
                due.add(key)
        pausing = {call.name: call for listed in calls.values() for call in listed if call.pauses}
        at_times = {kind for kind, listed in calls.items() if all(call.pauses or call.seldom for call in listed)}
        after = calls.get(EventKind.AFTER_UPDATE, [])
        after_update = None
        if all(call.once or call.pauses for call in after):
            must_pause = frozenset(call.first for call in after if not call.once)
            may_answer = frozenset(call.first for call in after if call.once)
            after_update = must_pause, may_answer
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[hit, rows] = StepPlan(
            calls,
            frozenset(due),
            [(self.probes[name], call.pauses, call.first) for name, call in pausing.items()],
            frozenset(calls.keys() - at_times),
            [(kind, frozenset(call.first for call in calls[kind] if call.pauses)) for kind in at_times],
            after_update,
            rows,
        )
        return plan

    def looks_at(self, kind: EventKind, step: int) -> bool:
        """Whether an event of this step is worth building."""
        if step != self._step:
            self.begin_step(step)
        return kind in self.wanted

    # -- calling them -----------------------------------------------------------------------

    @calls_foreign(lambda of: (of["call"].name, of["kind"].value))
    def sample(self, event: Event, at: float, into: list[Sample]) -> None:
        """Let every probe look that has something to do at this event.

        Errors are kept with the probe's name; after three a probe is left out.

        :param at: seconds of active training, the time of every sample.
        :param into: takes the samples.
        """
        step, kind, index = event.step, event.kind, event.optimizer_index
        if self.quiet_from < step < self.busy_at:
            self._step = step  # one of the steps that need not be begun
        elif step != self._step:
            self.begin_step(step)
            # Nobody announced this step, so nobody knows which events of it are worth building: all that may be.
            self.wanted.update(self.by_kind)
        if self.rows:  # so that probes hear of everything in its order
            self.catch_up()
        if event.optimizer is not None:
            known = self.optimizers.get(index)
            if known is None or known() is not event.optimizer:
                self.meet(event.optimizer, index)
        calls = self._plan.calls.get(kind)
        if calls is None:
            return
        demand, weight, answered, paused = self._demand, self._weight, self._answered, self._paused
        if kind is EventKind.EXCEPTION:  # the last one, and nobody rests any more
            paused = set()
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
            except BaseException as error:
                self.failed(call.name, kind.value, step, error)
            if weight:
                cost = self.cost[call.name]
                cost.calls += weight
                cost.ns += (perf_counter_ns() - began) * weight
        if kind is EventKind.TRAIN_START and any(hasattr(probe, "idle") for probe in self.by_kind.get(kind, ())):
            self.reschedule()
        elif kind is EventKind.BEFORE_UPDATE and len(self.optimizers) == 1:
            # Most that listen after an update have had their answer before it: then that event need not be built.
            after = self._plan.after_update
            if after is not None and EventKind.AFTER_UPDATE not in self._elsewhere:
                must_pause, may_answer = after
                if must_pause <= paused and may_answer <= answered | paused:
                    self.wanted.discard(EventKind.AFTER_UPDATE)

    # -- rows -----------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Ask probes about the rows that wait; their samples are kept until somebody takes them."""
        rows, self.rows = self.rows, []
        self._ask(rows, self._row_calls)

    def take_rows(self, before: int | None = None) -> list[Sample]:
        """Samples of all rows so far, in the order of their steps; nobody gets them a second time.

        Of the update at hand as well, as far as there is something to say before it is made: in a step in which
        nobody needs its samples before its end they are not asked for then.

        :param before: rows of this step and later ones are left for the next time, because numbers of theirs are still
            on a device; those of all others have arrived.
        """
        rows, later = self.rows, list[StepRow]()
        if before is not None:
            later = [row for row in rows if row.step >= before]
            rows = rows[: len(rows) - len(later)]
        if rows:
            self._ask(rows, self._row_calls)
        self.rows = later
        if self.open_row is not None and not later:
            self._ask([self.open_row], [call for call in self._row_calls if call.early])
        made, self._made = self._made, []
        made.sort(key=_STEP)
        if before is not None:
            ready = [sample for sample in made if sample.step < before]
            self._made = made[len(ready) :]
            made = list(arrived(ready))
        return made

    def _ask(self, rows: Sequence[StepRow], calls: Iterable[RowCall]) -> None:
        for row in rows:
            if row.late:
                row.arrived()
        for call in calls if rows else ():
            began = perf_counter_ns()
            try:
                self._made += call.ask(rows, self._demand)
            except (Exception, SystemExit) as error:
                self.failed(call.name, "sample_rows", rows[-1].step, error)
            cost = self.cost[call.name]
            cost.calls += len(rows)
            cost.ns += perf_counter_ns() - began

    def failed(self, name: str, method: str, step: int, error: BaseException) -> None:
        """A probe has failed: its error is kept; after three it is left out."""
        self._dispatch.failed(name, method, step, error)
        if self._dispatch.is_quarantined(name):
            self.plan()

    def was_called(self, name: str) -> bool:
        """Whether a probe was ever shown an event, with the fact that it looks at (``only_with``)."""
        return name in self.cost and self.cost[name].calls > 0

    def meet(self, optimizer: Any, index: int) -> None:
        """A new optimizer ends every pause: what probes knew of the old one says nothing of it."""
        self.optimizers[index] = weak(optimizer)
        self._paused.clear()
        self.wanted.update(self._plan.calls)

    def steps_left_out(self, last: int, now: float) -> None:
        """Nobody looked at some steps, up to and including ``last``; the next is watched. Between the two.

        :param now: reading of the session's clock.
        """
        self._step, self.busy_at = -1, 0
        self.catch_up()
        self._tell("steps_left_out", last, now)

    def time_stands_still(self, since: float, until: float | None) -> None:
        """What happens from ``since`` on is not timed; once ``until`` is known, it is again. Readings of the session's clock."""
        self._tell("untimed", since, until)

    def _tell(self, method: str, *given: Any) -> None:
        """Call a method of all wanted probes that have it."""
        for probe in {id(p): p for listed in self.by_kind.values() for p in listed}.values():
            hear = getattr(probe, method, None)
            if hear is not None:
                try:
                    hear(*given)
                except (Exception, SystemExit) as error:
                    self._dispatch.failed(probe.name, method, max(self._step, 0), error)

    # -- resume and end -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the probes must keep over a resume, by probe name."""
        wired = {p.name: p for listed in self.by_kind.values() for p in listed}
        saved = {}
        for name, probe in wired.items():
            if hasattr(probe, "state_dict"):
                try:
                    saved[name] = probe.state_dict()
                except BaseException as error:
                    self._dispatch.failed(name, "state_dict", self._step, error)
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Returns one sentence for every probe whose state cannot be read: it begins as if nothing had been."""
        fresh = []
        for name, state in saved.items():
            probe = self.probes.get(name)
            if probe is None or not hasattr(probe, "load_state_dict"):
                continue
            try:
                probe.load_state_dict(state)
            except BaseException as error:  # whatever another version of a probe, or somebody's plugin, makes of it
                if passes_on(error):
                    raise
                fresh.append(f"the probe {name} starts fresh: its saved state cannot be read ({describe(error)})")
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
