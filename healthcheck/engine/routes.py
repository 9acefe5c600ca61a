"""Where the samples of one evaluation go: worked out once, then reused while the same series come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from healthcheck.engine.demand import NEVER
from healthcheck.engine.judges import Judge, judges_of
from healthcheck.engine.lookups import Lookups, Watch, Watched
from healthcheck.engine.rulestate import RuleState
from healthcheck.samples import Labels, Sample

Series = tuple[str, Labels, str]
"""Metric, labels, phase."""

Look = tuple[int, Sequence[Judge]]
"""The place of a sample, and who judges it."""

SERIES = attrgetter("metric", "labels", "phase")
"""The series of a sample."""
_MOST_PLANNED = 100_000
"""Samples in all plans together: runs whose samples come in ever new shapes must not fill the memory."""


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

    __slots__ = ("_resting", "due", "following", "wakeful", "watched")

    def __init__(self, routes: Sequence[Route]) -> None:
        self.watched = Watched.of([route.watch for route in routes])
        self.following: Plan | None = None
        """The plan for the derived samples, where every formula had a value."""
        self.wakeful: list[Look] = [(i, r.wakeful) for i, r in enumerate(routes) if r.wakeful]
        self._resting: list[Look] = [(i, r.resting) for i, r in enumerate(routes) if r.resting]
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
    """The plan for each shape of samples that has come: ``plans[tuple(map(SERIES, samples))]``."""

    def __init__(self, states: Iterable[RuleState], lookups: Lookups) -> None:
        super().__init__()
        self._by_metric: dict[str, list[RuleState]] = {}
        for state in states:
            self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        self._lookups = lookups
        self._routes: dict[Series, Route] = {}
        self._planned = 0

    def __missing__(self, shape: tuple[Series, ...]) -> Plan:
        """Work out what to do with samples of a new shape."""
        self._planned += len(shape)
        if self._planned > _MOST_PLANNED:
            self.clear()
            self._planned = len(shape)
        plan = self[shape] = Plan([self._routes.get(series) or self._route(series) for series in shape])
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
        route = self._routes[series] = Route(
            self._lookups.watch(metric, labels),
            tuple(judge for judge in judges if judge[0].rule.every == 1),
            tuple(judge for judge in judges if judge[0].rule.every != 1),
        )
        return route

    def forget(self) -> None:
        """Series are made or restored: find all anew."""
        self._routes.clear()
        self.clear()
        self._planned = 0
