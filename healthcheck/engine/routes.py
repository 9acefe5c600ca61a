"""Which rules judge the samples of one evaluation: worked out once, then reused while the same series come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from healthcheck.engine.lookups import Watch
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import LOOK, SeriesState
from healthcheck.samples import Labels

Series = tuple[str, Labels, str]
"""Metric, labels, phase."""
Feed = Callable[[float, int, float], int]
Judge = tuple[RuleState, "SeriesState | None", Feed]
"""A rule, its state of one series (None: it watches absence, or its guards have not held yet), and what takes a value."""

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Route:
    """What one series means to the rules."""

    watch: Watch | None
    """What is looked up in it, before anything is judged."""
    judges: tuple[Judge, ...]
    """In file order."""


def judges_of(states: Iterable[RuleState], labels: Labels, phase: str) -> tuple[Judge, ...]:
    """Who judges samples with these labels and this phase, among the rules on their metric."""
    judges: list[Judge] = []
    for state in states:
        if state.phase not in ("any", phase) or state.across:
            continue
        if state.rule.condition.absence or (state.rule.only_if and labels not in state.series):
            if state.rule.selector.matches(labels):
                judges.append((state, None, _look))
            continue
        series = state.state_of(labels)
        if series is not None:
            judges.append((state, series, series.take))
    return tuple(judges)


class Plan:
    """What is done with samples of one shape: the series that came, in their order.

    Rules with ``every`` rest between two of their buckets: until step ``due`` only the others are asked.
    """

    __slots__ = ("_resting", "due", "everyone", "wakeful", "watches")

    def __init__(self, routes: Iterable[Route]) -> None:
        watches: list[tuple[int, Watch]] = []
        everyone: list[tuple[int, RuleState, SeriesState | None, Feed]] = []
        for index, route in enumerate(routes):
            if route.watch is not None:
                watches.append((index, route.watch))
            everyone += [(index, *judge) for judge in route.judges]
        self.watches = tuple(watches)
        """(place of the sample, what is looked up in it)"""
        self.everyone = tuple(everyone)
        """(place of the sample, rule, series, what takes its value)"""
        self.wakeful = tuple(entry for entry in everyone if entry[1].rule.every == 1)
        self._resting = [(state, series) for _, state, series, _ in everyone if state.rule.every != 1]
        self.due = 0 if self._resting else NEVER

    def rest(self) -> None:
        """After everyone was asked: nobody of those with ``every`` has anything to do before ``due``.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.
        """
        due = NEVER
        for state, series in self._resting:
            if state.shut or series is None:
                due = 0
                break
            due = min(due, (series.bucket + 1) * series.every)
        self.due = due


def _look(value: float, step: int, now: float) -> int:
    """Stands where there is no series to feed: the engine must look itself."""
    return LOOK
