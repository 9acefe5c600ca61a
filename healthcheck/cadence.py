"""Which probes look at which event of a step: those for which a rule is due, and that do not rest.

Asked at every step, and most steps are like one before: what was worked out for those at which the same
is due is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.engine.demand import RuleDemand
from healthcheck.events import Event, EventKind
from healthcheck.protocols import Probe
from healthcheck.samples import Sample

_PLANS = 256
"""Plans kept at most; rules with few ``every`` need a dozen."""
_LONG = 50
"""Steps for which a plan holds. Who rests for less stays in it: asking is cheaper than planning at every other step."""


@dataclass(slots=True)
class Call:
    """How one probe is called at one kind of event."""

    look: Callable[[Event, RuleDemand], Iterable[Sample]]
    name: str
    fact: str
    """A fact of the event without which it is not called; empty: none."""
    once: bool | None
    """Whether it is not called again once it has answered. None: its answers are not noted."""
    rester: Any
    """The probe, if it rests at times: then it has ``rests_until``."""
    marks: int
    """Bits of the marks at which it has something to do; 0: always."""


@dataclass(slots=True)
class Plan:
    """Who is called at some steps."""

    calls: Mapping[EventKind, Sequence[Call]]
    resters: Sequence[Any]
    """Probes among them that may rest for some steps."""
    until: int
    """Step at which it is made anew."""

    def resting(self, step: int) -> set[str]:
        """Names of those that rest at this step, from its beginning to its end."""
        return {probe.name for probe in self.resters if probe.rests_until > step}


class Cadence:
    """The calls of each step, by kind of event."""

    def __init__(self, demand: RuleDemand) -> None:
        self._demand = demand
        self._marks: list[tuple[int, int, int]] = []
        """``(every, ahead, bit)``: hit where ``step + ahead`` is a multiple of ``every``."""
        self._calls: dict[EventKind, list[Call]] = {}
        self._known: dict[int, Plan] = {}
        """The calls at steps that hit the same marks, as worked out last."""

    def wire(self, by_kind: Mapping[EventKind, Sequence[Probe]]) -> None:
        """Work out anew who is called when: probes or their ``every`` have changed."""
        wired = {id(p): p for listed in by_kind.values() for p in listed}.values()
        cadences = {probe.name: self._cadence(probe) for probe in wired}
        known = sorted({mark for marks in cadences.values() for mark in marks})
        self._marks = [(every, ahead, 1 << n) for n, (every, ahead) in enumerate(known)]
        bits = {(every, ahead): bit for every, ahead, bit in self._marks}

        def call(probe: Probe, kind: EventKind) -> Call:
            once = getattr(probe, "answers_once", ())
            due = kind in getattr(probe, "only_when_due", ())
            return Call(
                look=probe.sample,
                name=probe.name,
                fact=getattr(probe, "only_with", ""),
                once=kind in once if once else None,
                rester=probe if hasattr(probe, "rests_until") else None,
                marks=sum(bits[mark] for mark in cadences[probe.name]) if due else 0,
            )

        self._calls = {kind: [call(p, kind) for p in listed] for kind, listed in by_kind.items()}
        self._known.clear()

    def _cadence(self, probe: Probe) -> set[tuple[int, int]]:
        """``(every, ahead)``: a probe has something to do where ``step + ahead`` is a multiple; empty: always."""
        if not getattr(probe, "only_when_due", ()):
            return set()
        demand = self._demand
        keys = [metric.key for metric in probe.provides if demand.wants(metric.key)]
        everies = {demand.every[key] * demand.stretch.get(key, 1) for key in keys}
        if 1 in everies:
            return set()
        return {(every, ahead) for every in everies for ahead in range(getattr(probe, "steps_ahead", 0) + 1)}

    def plan(self, step: int, *, rests: bool) -> Plan:
        """Who is called at a step.

        :param rests: whether probes that rest for long are left out; others are named by :meth:`Plan.resting`.
        """
        due = 0
        for every, ahead, bit in self._marks:
            if not (step + ahead) % every:
                due |= bit
        if not rests:
            self._known.clear()  # whoever is called now may end its rest
            return self._plan(due, step, rests=False)
        known = self._known.get(due)
        if known is None or step >= known.until:
            if len(self._known) >= _PLANS:
                self._known.clear()
            known = self._known[due] = self._plan(due, step, rests=True)
        return known

    def _plan(self, due: int, step: int, *, rests: bool) -> Plan:
        resters: dict[str, Any] = {}
        now: dict[EventKind, Sequence[Call]] = {}
        for kind, calls in self._calls.items():
            chosen = now[kind] = []
            for call in calls:
                if call.marks and not call.marks & due:
                    continue
                if call.rester is not None and rests:
                    if call.rester.rests_until >= step + _LONG:
                        continue
                    resters[call.name] = call.rester
                chosen.append(call)
        return Plan(now, list(resters.values()), step + _LONG)
