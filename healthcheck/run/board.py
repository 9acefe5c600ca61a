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
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Probe
from healthcheck.core.rows import StepRow, Update, UsedBatch
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Sample, arrived
from healthcheck.engine.lookups import RuleDemand
from healthcheck.extend.dispatch import Dispatch
from healthcheck.extend.guard import calls_foreign, describe, passes_on
from healthcheck.rulelang.rule import SETTLED
from healthcheck.run.plans import Call, Key, RowCall, StepPlan, StepPlans

_WITHIN = frozenset(
    (
        EventKind.STEP_START,
        EventKind.BATCH_READY,
        EventKind.LOSS,
        EventKind.BACKWARD_END,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
)
"""What happens inside of a step."""
TIMED_EVERY = 7
"""Of so many steps one has its probes timed; a number that shares no factor with the usual ``every``."""
TIMED_FIRST = 20
"""Steps at the start that are timed one by one: they are not like those that follow."""
LOOKED_AT_FIRST = 50
"""Steps in which everything that is looked at now and then was looked at once or twice."""

_STEP = operator.attrgetter("step")
_FOUND = operator.attrgetter("found")


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
        self.receive: Callable[[Sequence[StepRow]], int | None] = lambda rows: None
        """Has the numbers of these rows that have come from a device by now; returns the oldest step of which some have not.
        Set by whoever sends for them."""
        self._made: list[Sample] = []
        """Samples of rows that were asked for before anybody took them."""
        self._asked_early: list[StepRow] = []
        """Those of these rows of which numbers had not come from the device by then."""
        self._elsewhere: frozenset[EventKind] = frozenset()
        self._heard: frozenset[EventKind] = frozenset()
        self._within = _WITHIN
        """Kinds of event of which none is wanted in a quiet step."""
        self._closed = False
        self._fault = -1
        """The last step whose loss was not finite."""
        self._step = -1
        self._steps = 0
        self._weight = 0
        """How many steps this one stands for in :attr:`cost`; 0: it is not timed."""
        self._plans = StepPlans(demand)
        self._plan = StepPlan()
        """Of the step at hand."""
        self._paused: set[Key] = set()
        """Who has nothing to do in this step."""
        self._rests: dict[tuple[str, str, int], tuple[int, int]] = {}
        """Where several optimizers take turns: until when a probe rests for each of them, and in which step it has said so.
        By its name, the attribute in which it says so, and the optimizer."""
        self._together: dict[tuple[str, str], int] = {}
        """The same for all of them: until the first of these rests ends. A probe that does not rest for one of them is not here."""
        self._answered: set[Key] = set()
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
        self._elsewhere, self._heard, self._within = kinds, heard, _WITHIN - heard
        self.wanted.clear()
        self.wanted.update(kinds, self.by_kind)
        self._step, self.busy_at = -1, 0

    def reschedule(self) -> None:
        """``every`` of some metric, or the probes themselves, have changed: plan all steps anew."""
        self.catch_up()
        self._plans.wire(self.by_kind)
        self.looks, self.batch_looks = self._plans.looks, self._plans.batch_looks
        self.heard_elsewhere(self._elsewhere, self._heard)

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
        for every, ahead, bit in self._plans.marks:
            if not (step + ahead) % every:
                hit |= bit
        plan = self._plans.known.get((hit, rows))
        if plan is None:
            plan = self._plans.make(hit, rows)
        self._plan = plan
        self._demand.due_now = plan.due
        paused = self._paused
        paused.clear()
        several, together, for_all = len(self.optimizers) > 1, self._together, plan.for_all
        woken = sys.maxsize
        for probe, rest, key in plan.pausing:
            # Where optimizers take turns, what is known of one says nothing of the next.
            until = together.get((key[0], rest), 0) if several and key not in for_all else getattr(probe, rest)
            if until > step:
                paused.add(key)
                if until < woken:
                    woken = until
        wanted = self.wanted
        wanted.clear()
        wanted.update(self._heard if rows else self._elsewhere, plan.kinds)
        for kind, keys in plan.unless_paused:
            if not keys <= paused:
                wanted.add(kind)
        for probe, look in self._plans.look_pauses:
            if (probe.looks_from > step) is (look in self.looks):  # type: ignore[attr-defined]
                self._choose_looks(step)
        self.quiet_from, self.busy_at = step, 0
        busy = self._plans.busy
        if rows and not hit & busy and not self.measures_device and wanted.isdisjoint(self._within):
            if hit:
                self._demand.due_now = self._plans.nothing_due.due
            # The first step after this one that is not like it.
            if self.device_time is not None:
                woken = min(woken, step + self.device_time.every - self._steps % self.device_time.every)
            for every, ahead, bit in self._plans.marks:
                if bit & busy:
                    woken = min(woken, step + every - (step + ahead) % every)
            self.busy_at = woken

    def _choose_looks(self, step: int) -> None:
        left_out = [look for probe, look in self._plans.look_pauses if probe.looks_from > step]  # type: ignore[attr-defined]
        self.looks = [look for look in self._plans.looks if look not in left_out]

    def look_for_fault(self, step: int) -> None:
        """The loss of a step that is noted in rows is not finite: those are asked who say where that came from.

        Nothing of such a step is usual, so what is looked at now and then is looked at another time; but not in the first steps
        of a run, nor where the step before was no better: then there is no other time, and what is seen may be why.
        """
        alone, self._fault = step > self._fault + 1, step
        if alone and self._steps > LOOKED_AT_FIRST:
            self._plan = plan = self._plans.nothing_due
            self._demand.due_now = plan.due
            self._paused.update([key for _, _, key in plan.pausing])
            self.wanted.clear()
            self.wanted.update(self._heard, plan.kinds)
        self.look_closely()

    def look_closely(self, *, loads: bool = False) -> None:
        """Something happens in the step at hand: those are asked who otherwise hear of it from its row, while it is there
        to be seen, and the events are built at which rules are judged.

        :param loads: a loader begins a pass, or gives nothing.
        """
        self.busy_at = 0
        keys, kinds = self._plan.closely[loads]
        self._paused -= keys
        if self._rests:
            names = {name for name, _ in keys}
            self._rests = {key: rest for key, rest in self._rests.items() if key[0] not in names}
            self._together = {key: until for key, until in self._together.items() if key[0] not in names}
        self.wanted.update(kinds, self._elsewhere)

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
        if event.optimizer is not None:
            known = self.optimizers.get(index)
            if known is None or known() is not event.optimizer:
                self.meet(event.optimizer, index)
        calls = self._plan.calls.get(kind)
        if calls is None:
            return
        demand, weight, answered, paused = self._demand, self._weight, self._answered, self._paused
        one_of_several, said = event.optimizer is not None and len(self.optimizers) > 1, 0
        if kind is EventKind.EXCEPTION:  # the last one, and nobody rests any more
            paused = set()
        for call in calls:
            if call.pauses and call.first in paused:
                continue
            if call.fact and getattr(event, call.fact) is None:
                continue
            if call.once and (call.name, index) in answered:
                continue
            each = one_of_several and call.each
            if each:
                rest = self._rests.get((call.name, call.pauses, index))
                if rest is not None and rest[0] > step > rest[1]:
                    continue
            if call.reads_rows and self.rows:  # so that it hears of everything in its order
                self.catch_up()
            began = perf_counter_ns() if weight else 0
            try:
                if each:
                    said = getattr(call.probe, call.pauses)
                    setattr(call.probe, call.pauses, 0)
                made = call.look(event, demand)
                if made:
                    for sample in made:
                        sample.time = at
                        into.append(sample)
                    if call.once is not None:
                        answered.add((call.name, index))
                if each:
                    self._note_rest(call, index, step, said)
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

    def _note_rest(self, call: Call, index: int, step: int, before: int) -> None:
        """A probe was called for one of several optimizers: what it has said now of a rest concerns that one alone.

        :param before: what it had said before, perhaps for another one. It holds nothing while the probe is asked.
        """
        name, attribute = call.name, call.pauses
        until = getattr(call.probe, attribute)
        if until:
            self._rests[name, attribute, index] = until, step
            rests = [self._rests.get((name, attribute, known), (0,))[0] for known in self.optimizers]
            self._together[name, attribute] = min(rests)
            return
        setattr(call.probe, attribute, before)
        rest = self._rests.get((name, attribute, index))
        if rest is None or rest[1] < step:  # else it has said so at an earlier event of this step
            self._rests.pop((name, attribute, index), None)
            self._together.pop((name, attribute), None)

    # -- rows -----------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Ask probes about the rows that wait; their samples are kept until somebody takes them."""
        rows, self.rows = self.rows, []
        if self._asked_early or (rows and (rows[0].late or rows[-1].numbers is not None)):
            before = self._receive(rows)
            if before is not None:
                self._asked_early += [row for row in rows if row.step >= before]
        self._ask(rows, self._plans.row_calls)

    def _receive(self, rows: Sequence[StepRow]) -> int | None:
        """Have what has arrived of these rows and of those that were asked about early.

        A number that is there is a float, and whatever is made of it is made at once: so what waited for numbers of earlier steps
        is made before that. Returns the oldest step of which numbers are still on their way.
        """
        early = self._asked_early
        before = self.receive([*early, *rows])
        if early:
            self._asked_early = [] if before is None else [row for row in early if row.step >= before]
            late = [] if before is None else [sample for sample in self._made if sample.step >= before]
            known = self._made if before is None else [sample for sample in self._made if sample.step < before]
            self._made = arrived(known) + late
        return before

    def take_rows(self, *, arrived_only: bool = False) -> list[Sample]:
        """Samples of all rows so far, in the order of their steps; nobody gets them a second time.

        Of the update at hand as well, as far as there is something to say before it is made: in a step in which
        nobody needs its samples before its end they are not asked for then.

        :param arrived_only: rows from the first step on of which numbers are still on a device are left for the next time.
        """
        rows, later = self.rows, list[StepRow]()
        before = self._receive(rows)
        if not arrived_only:
            before, self._asked_early = None, []
        if before is not None:
            later = [row for row in rows if row.step >= before]
            rows = rows[: len(rows) - len(later)]
        if rows:
            self._ask(rows, self._plans.row_calls)
        self.rows = later
        if self.open_row is not None and not later:
            self._ask([self.open_row], [call for call in self._plans.row_calls if call.early])
        made, self._made = self._made, []
        made.sort(key=_STEP)
        if before is not None:
            ready = [sample for sample in made if sample.step < before]
            self._made = made[len(ready) :]
            made = arrived(ready)
        return made

    def _ask(self, rows: Sequence[StepRow], calls: Iterable[RowCall]) -> None:
        if not rows:
            return
        for row in rows:
            if row.late:
                row.arrived()
        last, found = rows[-1].step, set[str]().union(*map(_FOUND, rows))
        for call in calls:
            if call.found and call.name not in found:
                continue
            if call.fact is not None and list(map(call.fact, rows)).count(None) == len(rows):
                continue
            began = perf_counter_ns()
            try:
                self._made += call.ask(rows, self._demand)
            except (Exception, SystemExit) as error:
                self.failed(call.name, "sample_rows", last, error)
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
        self._rests.clear()
        self._together.clear()
        self._paused &= self._plan.steady
        self._plans.wake()
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
