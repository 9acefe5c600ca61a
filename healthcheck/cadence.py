"""Which probes look at which event of a step: those for which a rule is due, and that do not rest.

Asked at every step, and most steps are like the one before: what was worked out then is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.engine.demand import NEVER, RuleDemand
from healthcheck.events import Event, EventKind
from healthcheck.protocols import Probe
from healthcheck.samples import Sample


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


class Cadence:
    """The calls of each step, by kind of event."""

    def __init__(self, demand: RuleDemand) -> None:
        self._demand = demand
        self._marks: list[tuple[int, int, int]] = []
        """``(every, ahead, bit)``: hit where ``step + ahead`` is a multiple of ``every``."""
        self._calls: dict[EventKind, list[Call]] = {}
        self._now: Mapping[EventKind, Sequence[Call]] = {}
        self._due = -1
        self._wake = 0
        """Step at which somebody ends a rest."""
        self._awake: list[Any] = []
        """Those who may begin one."""

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
        self._due = -1

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

    def calls(self, step: int, *, rests: bool) -> Mapping[EventKind, Sequence[Call]]:
        """Who is called at a step.

        :param rests: whether probes that rest are left out.
        """
        due = 0
        for every, ahead, bit in self._marks:
            if not (step + ahead) % every:
                due |= bit
        if due == self._due and step < self._wake and rests:
            for probe in self._awake:
                if probe.rests_until > step:
                    break
            else:
                return self._now
        wake, awake = NEVER, {}
        now: dict[EventKind, Sequence[Call]] = {}
        for kind, calls in self._calls.items():
            chosen = now[kind] = []
            for call in calls:
                if call.marks and not call.marks & due:
                    continue
                if call.rester is not None and rests:
                    if call.rester.rests_until > step:
                        wake = min(wake, call.rester.rests_until)
                        continue
                    awake[id(call.rester)] = call.rester
                chosen.append(call)
        self._now, self._due, self._wake, self._awake = now, due if rests else -1, wake, list(awake.values())
        return now
