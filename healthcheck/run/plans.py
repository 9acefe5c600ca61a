"""Plans of steps: which probes are called at which event of a step, worked out once for all steps in which the same is due.

What a probe declares about itself (:class:`healthcheck.core.protocols.Probe`) is read here and nowhere else.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand, Probe
from healthcheck.core.rows import StepRow, Update, UsedBatch
from healthcheck.core.samples import Sample
from healthcheck.engine.lookups import RuleDemand

SELDOM = {(EventKind.STEP_END, "loads"), (EventKind.STEP_END, "metrics"), (EventKind.BATCH_READY, "worker_draws")}
"""Facts for which alone an event is built: most steps have none of them."""
_PLANS = 256
"""Plans kept at most; rules with few ``every`` need a dozen."""


Key = tuple[str, int]
"""Name of a probe and index of an optimizer."""
Pause = tuple[Any, str, Key]
"""A probe, the attribute in which it says until when it pauses, and its key."""


@dataclass(slots=True)
class Call:
    """How one probe is called at one kind of event."""

    look: Callable[[Event, Demand], Iterable[Sample]]
    probe: Probe
    name: str
    first: Key
    """The probe, for the first optimizer."""
    fact: str
    """A fact of the event without which it is not called; empty: none."""
    once: bool | None
    """Whether it is not called again once it has answered. None: its answers are not noted."""
    pauses: str
    """The attribute in which it says that it has nothing to do for a while; empty: it never does."""
    each: bool
    """Whether what it says there at an event of an optimizer concerns that optimizer alone, where there are several."""
    marks: int
    """Bits of the schedule at which it has something to do; 0: always."""
    seldom: bool
    """Whether :attr:`fact` is there so seldom that whoever builds the event looks for it."""
    reads_rows: bool
    """Whether it hears of steps from their rows as well."""


@dataclass(slots=True)
class RowCall:
    """How one probe is asked about rows."""

    ask: Callable[[Sequence[StepRow], Demand], Iterable[Sample]]
    name: str
    early: bool
    """Whether it can answer before the update is made."""
    fact: Callable[[StepRow], Any] | None
    """What must be there in one of the rows (``rows_with``); None: nothing."""
    found: bool
    """Whether it must have left something in one of them itself."""


@dataclass(slots=True)
class StepPlan:
    """What all steps have in common in which the same is due."""

    calls: Mapping[EventKind, Sequence[Call]] = field(default_factory=dict)
    due: frozenset[str] = frozenset()
    """Keys of the metrics that are due."""
    pausing: Sequence[Pause] = ()
    """Probes among the called that pause at times."""
    for_all: frozenset[Key] = frozenset()
    """Those of them, by their keys, whose pause is one for all optimizers that take turns."""
    steady: frozenset[Key] = frozenset()
    """Those of them, by their keys, whose pause has nothing to do with optimizers: no new one ends it."""
    closely: Mapping[bool, tuple[frozenset[Key], frozenset[EventKind]]] = field(
        default_factory=lambda: dict.fromkeys((False, True), (frozenset(), frozenset()))
    )
    """Those who are called where something happens in a step that is noted in rows, and the kinds of event at which they are.
    True: a loader begins a pass, or gives nothing; False: else. Whom rows spare no event rests while loaders have nothing
    for it to see, and that is so whatever else happens in the step."""
    kinds: frozenset[EventKind] = frozenset()
    """Kinds at which somebody is called who never pauses."""
    unless_paused: Sequence[tuple[EventKind, frozenset[Key]]] = ()
    """Kinds at which nobody is called if all of these pause."""
    after_update: tuple[frozenset[Key], frozenset[Key]] | None = None
    """So that nobody is left to call after the update: who has to pause, and who has to pause or to have answered
    before it. None: somebody always is."""


def _noted(probe: Probe) -> tuple[EventKind, ...]:
    """Kinds of event that rows spare a probe."""
    return getattr(probe, "noted", ()) if hasattr(probe, "sample_rows") else ()


def _idle(probe: Probe, kind: EventKind) -> bool:
    """Whether a probe has nothing to do in this training, which it finds out when that begins."""
    return kind is not EventKind.TRAIN_START and bool(getattr(probe, "idle", False))


def _rest_of(probe: Probe, rows: bool) -> str:
    """The attribute in which a probe says until when it wants no events."""
    if rows and hasattr(probe, "events_from"):
        return "events_from"
    return "rests_until" if hasattr(probe, "rests_until") else ""


_OF_ONE = frozenset((EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE))
"""Events at which a probe sees one optimizer at a time."""


def _rests_for_all(probe: Probe, rows: bool) -> bool:
    """Whether a pause holds whichever optimizer steps: a probe says so, or is never shown one of them."""
    said = getattr(probe, "rests_always", False) or getattr(probe, "rests_for_all", False)
    return said or _OF_ONE.isdisjoint(set(probe.listens_to).difference(_noted(probe) if rows else ()))


ROW_FACTS = frozenset(known.name for known in fields(StepRow))
"""What a probe may name in ``rows_with``."""


class StepPlans:
    """The plans of one board, made as they are needed and kept until the demand or the probes change."""

    def __init__(self, demand: RuleDemand) -> None:
        self.marks: list[tuple[int, int, int]] = []
        """``(every, ahead, bit)``: hit where ``step + ahead`` is a multiple of ``every``."""
        self.busy = 0
        """Bits of the marks at which somebody has to be called, or to know what is due, in a step that is noted in rows. At the
        others some metric is due that its probe works out from the rows, or at an event that it pauses for."""
        self.known: dict[tuple[int, bool], StepPlan] = {}
        """By the marks that a step hits, and whether it is noted in rows."""
        self.row_calls: list[RowCall] = []
        self.looks: list[tuple[str, Callable[[StepRow, Update], None]]] = []
        """Who looks at every update of a step that is noted in rows, with the name of the probe; below, at every batch."""
        self.look_pauses: list[tuple[Probe, tuple[str, Callable[[StepRow, Update], None]]]] = []
        """Those of them, with their probes, that say from which step on (``looks_from``)."""
        self.batch_looks: list[tuple[str, Callable[[StepRow, UsedBatch], None]]] = []
        self._demand = demand
        self._probes: dict[str, Probe] = {}
        self._due: list[tuple[str, int]] = []
        """Keys of what is wanted, with the bit of the steps in which each is due; 0: in all."""
        self._calls: dict[bool, dict[EventKind, list[Call]]] = {}
        """All calls, due or not, by whether the step is noted in rows."""

    def wire(self, by_kind: Mapping[EventKind, Collection[Probe]]) -> None:
        """Begin anew with these probes, by the events that they listen to, and with what is wanted now."""
        wired = self._probes = {probe.name: probe for listed in by_kind.values() for probe in listed}
        schedules = {name: self._schedule_of(probe) for name, probe in wired.items()}
        marks = {mark for marks in schedules.values() for mark in marks}
        paces = {key: (self._demand.every_of(key), 0) for key in self._demand.every}
        marks |= set(paces.values()) - {(1, 0)}
        self.marks = [(every, ahead, 1 << n) for n, (every, ahead) in enumerate(sorted(marks))]
        bits = {(every, ahead): bit for every, ahead, bit in self.marks}
        self._due = [(key, bits.get(pace, 0)) for key, pace in paces.items()]

        def call(probe: Probe, kind: EventKind, rows: bool) -> Call:
            once = getattr(probe, "answers_once", ())
            due, pauses = kind in getattr(probe, "only_when_due", ()), _rest_of(probe, rows)
            return Call(
                look=probe.sample,
                probe=probe,
                name=probe.name,
                first=(probe.name, 0),
                fact=getattr(probe, "only_with", ""),
                once=kind in once if once else None,
                pauses=pauses,
                each=bool(pauses) and not _rests_for_all(probe, rows),
                marks=sum(bits[mark] for mark in schedules[probe.name]) if due else 0,
                seldom=(kind, getattr(probe, "only_with", "")) in SELDOM,
                reads_rows=hasattr(probe, "sample_rows"),
            )

        for rows in (False, True):
            self._calls[rows] = calls = {}
            for kind, listed in by_kind.items():
                hear = [p for p in listed if not (rows and kind in _noted(p)) and not _idle(p, kind)]
                if hear:
                    calls[kind] = [call(probe, kind, rows) for probe in hear]
        self.busy = 0
        for called in self._calls[True].values():
            for one in called:
                self.busy |= one.marks
        due = dict(self._due)
        self.known.clear()
        self.row_calls, self.looks, self.look_pauses, self.batch_looks = [], [], [], []
        for probe in wired.values():
            if hasattr(probe, "sample_rows") and not getattr(probe, "idle", False):
                early = EventKind.BEFORE_UPDATE in _noted(probe)
                fact = getattr(probe, "rows_with", "")
                # A name that no row has asks for nothing: `check_plugin` says so, and a run goes on.
                read = operator.attrgetter(fact) if fact in ROW_FACTS and fact != "found" else None
                self.row_calls.append(RowCall(probe.sample_rows, probe.name, early, read, fact == "found"))
                if hasattr(probe, "look"):
                    self.looks.append((probe.name, probe.look))
                    if hasattr(probe, "looks_from"):
                        self.look_pauses.append((probe, self.looks[-1]))
                if hasattr(probe, "look_at_batch"):
                    self.batch_looks.append((probe.name, probe.look_at_batch))
                if hasattr(probe, "look") or hasattr(probe, "look_at_batch"):
                    for metric in probe.provides:
                        self.busy |= due.get(metric.key, 0)

    def wake(self) -> None:
        """End every pause that has to do with optimizers; who has said that it is done for good stays so."""
        for probe in self._probes.values():
            if not getattr(probe, "rests_always", False):
                for attribute in ("rests_until", "events_from", "looks_from"):
                    if 0 < getattr(probe, attribute, 0) < sys.maxsize:
                        with contextlib.suppress(AttributeError):  # a plugin's may be a property
                            setattr(probe, attribute, 0)

    def _schedule_of(self, probe: Probe) -> set[tuple[int, int]]:
        """``(every, ahead)``: a probe has something to do where ``step + ahead`` is a multiple; empty: always."""
        if not getattr(probe, "only_when_due", ()):
            return set()
        everies = {self._demand.every_of(m.key) for m in probe.provides if self._demand.wants(m.key)}
        if 1 in everies:
            return set()
        return {(every, ahead) for every in everies for ahead in range(getattr(probe, "steps_ahead", 0) + 1)}

    @property
    def nothing_due(self) -> StepPlan:
        """The plan of a step that is noted in rows and hits no mark."""
        return self.known.get((0, True)) or self.make(0, True)

    def make(self, hit: int, rows: bool) -> StepPlan:
        """The plan of all steps that hit these marks; whoever asks has not found it in :attr:`known`."""
        calls: dict[EventKind, list[Call]] = {}
        for kind, listed in self._calls[rows].items():
            chosen = [call for call in listed if not call.marks or call.marks & hit]
            if chosen:
                calls[kind] = chosen
        pausing = {call.name: call for listed in calls.values() for call in listed if call.pauses}
        at_times = {kind for kind, listed in calls.items() if all(call.pauses or call.seldom for call in listed)}
        after = calls.get(EventKind.AFTER_UPDATE, [])
        after_update = None
        if all(call.once or call.pauses for call in after):
            must_pause = frozenset(call.first for call in after if not call.once)
            may_answer = frozenset(call.first for call in after if call.once)
            after_update = must_pause, may_answer
        if len(self.known) >= _PLANS:
            self.known.clear()
        pauses = [(self._probes[name], call.pauses, call.first) for name, call in pausing.items()]
        always = [pause for pause in pauses if getattr(pause[0], "rests_always", False)]
        woken = [pause for pause in pauses if pause[1] == "events_from" and pause not in always]

        def closely(woken: Sequence[Pause]) -> tuple[frozenset[Key], frozenset[EventKind]]:
            kinds = frozenset([kind for probe, _, _ in woken for kind in probe.listens_to if kind in calls])
            return frozenset([key for _, _, key in woken]), kinds

        plan = self.known[hit, rows] = StepPlan(
            calls=calls,
            due=frozenset([key for key, bit in self._due if not bit or bit & hit]),
            pausing=pauses,
            for_all=frozenset([call.first for call in pausing.values() if not call.each]),
            steady=frozenset([key for _, _, key in always]),
            closely={False: closely([pause for pause in woken if _noted(pause[0])]), True: closely(woken)},
            kinds=frozenset(calls.keys() - at_times),
            unless_paused=[(kind, frozenset([c.first for c in calls[kind] if c.pauses])) for kind in at_times],
            after_update=after_update,
        )
        return plan
