"""Where the samples of one evaluation go: worked out once, then reused while the same series come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from healthcheck.core.samples import Labels, Sample
from healthcheck.engine.demand import NEVER
from healthcheck.engine.lookups import Lookups, Watch, Watched
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState

Series = tuple[str, Labels, str]
"""Metric, labels, phase."""

Judge = tuple[RuleState, "SeriesState | None"]
"""A rule and its state of one series. None: it watches absence, or its guards have not held yet."""

Look = tuple[int, Sequence[Judge]]
"""The place of a sample, and who judges it."""

SERIES = attrgetter("metric", "labels", "phase")
"""The series of a sample."""
_MOST_PLANNED = 100_000
"""Samples in all plans together: runs whose samples come in ever new shapes must not fill the memory."""


def judges_of(states: Iterable[RuleState], labels: Labels, phase: str) -> list[Judge]:
    """Who judges samples with these labels and this phase, among the rules on their metric; in file order."""
    judges: list[Judge] = []
    for state in states:
        if state.phase not in ("any", phase) or state.across:
            continue
        if state.rule.condition.absence or (state.rule.only_if and labels not in state.series):
            if state.rule.selector.matches(labels):
                judges.append((state, None))
            continue
        series = state.state_of(labels)
        if series is not None:
            judges.append((state, series))
    return judges


class Route(NamedTuple):
    """What one series means to the rules."""

    watch: Watch | None
    """What is looked up in it, before anything is judged."""
    wakeful: tuple[Judge, ...]
    """Rules that judge every sample, in file order."""
    resting: tuple[Judge, ...]
    """Rules with ``every``."""


class Plan:
    """What is done with samples of one shape: the series that came, in their order.

    Rules with ``every`` rest between two of their buckets: until step ``due`` only the others are asked.
    """

    __slots__ = ("_resting", "due", "following", "shape", "wakeful", "watched")

    def __init__(self, shape: tuple[Series, ...], routes: Sequence[Route]) -> None:
        self.shape = shape
        self.following: Plan | None = None
        """The plan for the derived samples, where every formula had a value."""
        self.wakeful: list[Look] = []
        self._resting: list[Look] = []
        watches: list[tuple[int, Watch, str]] = []
        for index, route in enumerate(routes):
            if route.wakeful:
                self.wakeful.append((index, route.wakeful))
            if route.resting:
                self._resting.append((index, route.resting))
            if route.watch is not None:
                watches.append((index, route.watch, shape[index][2]))
        self.watched = Watched.of(watches) if watches else None
        self.due = 0 if self._resting else NEVER

    def woken(self, samples: Sequence[Sample]) -> list[Look]:
        """The others and those with ``every`` whose turn it is; none of them has anything to do before the new ``due``.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.
        """
        looks, due = self.wakeful[:], NEVER
        for index, judges in self._resting:
            step = samples[index].step
            turn = []
            for judge in judges:
                state, series = judge
                if state.shut or series is None:
                    due = 0
                    turn.append(judge)
                    continue
                bucket = step // series.every
                if bucket > series.bucket:
                    series.bucket = bucket
                    turn.append(judge)
                due = min(due, (series.bucket + 1) * series.every)
            if turn:
                looks.append((index, turn))
        self.due = due
        return looks


class Plans(dict[tuple[Series, ...], Plan]):
    """The plan for each shape of samples that has come: ``plans[tuple(map(SERIES, samples))]``.

    A shape is costly to build and to hash. ``latest`` holds the last plan for each number of samples: mostly it fits,
    and to compare is cheaper.
    """

    def __init__(self, states: Iterable[RuleState], lookups: Lookups) -> None:
        super().__init__()
        self._by_metric: dict[str, list[RuleState]] = {}
        for state in states:
            self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        self._lookups = lookups
        self._routes: dict[Series, Route] = {}
        self._planned = 0
        self.latest: dict[int, Plan] = {}

    def __missing__(self, shape: tuple[Series, ...]) -> Plan:
        """Work out what to do with samples of a new shape."""
        self._planned += len(shape)
        if self._planned > _MOST_PLANNED:
            self.clear()
            self.latest.clear()
            self._planned = len(shape)
        plan = self[shape] = Plan(shape, [self._routes.get(series) or self._route(series) for series in shape])
        return plan

    def after(self, plan: Plan, made: Sequence[Sample]) -> Plan:
        """The plan for derived samples that those of ``plan`` gave."""
        if plan.watched is None or len(made) != len(plan.watched.derivations):
            return self[tuple(map(SERIES, made))]
        if plan.following is None:
            plan.following = self[tuple(map(SERIES, made))]
        return plan.following

    def _route(self, series: Series) -> Route:
        metric, labels, phase = series
        judges = judges_of(self._by_metric.get(metric, ()), labels, phase)
        wakeful: list[Judge] = []
        resting: list[Judge] = []
        for judge in judges:
            (wakeful if judge[0].rule.every == 1 else resting).append(judge)
        route = self._routes[series] = Route(self._lookups.watch(metric, labels), tuple(wakeful), tuple(resting))
        return route

    def forget(self) -> None:
        """Series are made or restored: find all anew."""
        self._routes.clear()
        self.clear()
        self.latest.clear()
        self._planned = 0
