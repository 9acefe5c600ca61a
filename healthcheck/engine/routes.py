"""Where the samples of one evaluation go: worked out once, then reused while the same series come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import gt, itemgetter, lt

from healthcheck.engine.backlog import Backlog, Twice
from healthcheck.engine.demand import NEVER
from healthcheck.engine.judges import Judge, judges_of
from healthcheck.engine.lookups import Lookups, Watch, derivations
from healthcheck.engine.rulestate import RuleState
from healthcheck.samples import Labels, Sample

Series = tuple[str, Labels, str]
"""Metric, labels, phase."""

Look = tuple[tuple[Judge, ...], Sample]
"""Rules that have to look at a sample."""

_MOST_PLANNED = 100_000
"""Samples in all plans together: runs whose samples come in ever new shapes must not fill the memory."""
_append = list.append
_first = itemgetter(0)
_exhaust = deque[None](maxlen=0).extend
"""Runs an iterator to its end."""


@dataclass(frozen=True, slots=True)
class Route:
    """What one series means to the rules."""

    watch: Watch | None
    """What is looked up in it, before anything is judged."""
    backlog: Backlog | None
    """Who looks at every sample; None if nobody does."""
    resting: tuple[Judge, ...]
    """Rules with ``every``."""


class Plan:
    """What is done with samples of one shape.

    Rules with ``every`` rest between two of their buckets: until step ``due`` only the others are asked. What need not be
    looked at is kept without a look at each sample: bounds, values and places stand in lists of equal length.
    """

    __slots__ = (
        "_backlogs", "_closed", "_columns", "_highs", "_kept", "_lows", "_pick", "_prompt", "_resting", "_room", "_steps", "after", "derivations", "due",
        "resting", "stale", "watches",
    )  # fmt: skip

    def __init__(self, routes: Sequence[Route], *, twice: bool) -> None:
        self.watches = tuple((i, r.watch) for i, r in enumerate(routes) if r.watch is not None)
        """(place of the sample, what is looked up in it)"""
        self.derivations = derivations(self.watches)
        self.resting = tuple((i, r.resting) for i, r in enumerate(routes) if r.resting)
        """(place of the sample, rules with ``every``)"""
        self._resting = [judge for _, judges in self.resting for judge in judges]
        self.due = 0 if self._resting else NEVER
        backlogs = [(i, r.backlog) for i, r in enumerate(routes) if r.backlog is not None]
        self._backlogs = [(i, Twice(b) if twice else b) for i, b in backlogs]
        self.stale = True
        """Bounds have changed since they were listed."""
        self.after: Plan | None = None
        """What is done with the derived samples, if each formula gives one."""

    def take(self, samples: Sequence[Sample]) -> list[Look]:
        """Take the samples; who has to look at which of them."""
        if self.stale:
            self._list()
        picked = self._pick(samples)
        values = [sample.value for sample in picked]
        if self._room > 0 and all(map(lt, self._lows, values)) and all(map(gt, self._highs, values)):
            self._room -= 1
            _exhaust(map(_append, self._columns, values))
            _exhaust(map(_append, self._steps, [sample.step for sample in picked]))
            looks = self._prompt[:]
        else:
            looks = self._one_by_one(picked)
        if self._closed:
            looks += [(index, backlog.take(samples[index])) for index, backlog in self._closed]
            looks.sort(key=_first)
        return [(judges, samples[index]) for index, judges in looks]

    def _one_by_one(self, picked: Sequence[Sample]) -> list[tuple[int, tuple[Judge, ...]]]:
        """Some backlog is full, or a value does not lie within its bounds."""
        kept, lows, highs = self._kept, self._lows, self._highs
        looks = []
        stale = False
        for at, sample in enumerate(picked):
            index, backlog = kept[at]
            if lows[at] < sample.value < highs[at] and len(backlog.values) < backlog.room:
                judges = backlog.keep(sample.value, sample.step)
            else:
                judges = backlog.take(sample)
                lows[at], highs[at] = backlog.low, backlog.high
                stale = stale or not backlog.open
            if judges:
                looks.append((index, judges))
        self._room = min([backlog.room - len(backlog.values) for _, backlog in kept], default=NEVER)
        self._prompt = [(index, backlog.prompt) for index, backlog in kept if backlog.prompt]
        self.stale = stale
        return looks

    def _list(self) -> None:
        self.stale = False
        for _, backlog in self._backlogs:
            backlog.list_in(self)
        self._kept = [(i, b) for i, b in self._backlogs if b.open]
        self._closed = [(i, b) for i, b in self._backlogs if not b.open]
        self._lows, self._highs = [b.low for _, b in self._kept], [b.high for _, b in self._kept]
        self._columns, self._steps = [b.values for _, b in self._kept], [b.steps for _, b in self._kept]
        self._room = min([b.room - len(b.values) for _, b in self._kept], default=NEVER)
        self._prompt = [(i, b.prompt) for i, b in self._kept if b.prompt]
        self._pick = _picker([i for i, _ in self._kept])

    def rest(self) -> None:
        """After everyone was asked: nobody of those with ``every`` has anything to do before ``due``.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.
        """
        due = NEVER
        for state, series, _ in self._resting:
            if state.shut or series is None:
                due = 0
                break
            due = min(due, (series.bucket + 1) * series.every)
        self.due = due


def _picker(places: list[int]) -> Callable[[Sequence[Sample]], Sequence[Sample]]:
    """What takes the samples at these places out of all."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda samples: [samples[place] for place in places]


class Routes:
    """The routes of all series that have come, and the plans made of them."""

    def __init__(self, states: Iterable[RuleState], lookups: Lookups) -> None:
        self._by_metric: dict[str, list[RuleState]] = {}
        for state in states:
            self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        self._lookups = lookups
        self._routes: dict[Series, Route] = {}
        self._plans: dict[tuple[str, ...], list[tuple[list[Labels], list[str], Plan]]] = {}
        """By their metrics; then by labels and phases."""
        self._planned = 0

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """What to do with these samples."""
        metrics = tuple([sample.metric for sample in samples])
        labels = [sample.labels for sample in samples]
        phases = [sample.phase for sample in samples]
        alike = self._plans.get(metrics, ())
        for known_labels, known_phases, plan in alike:
            if labels == known_labels and phases == known_phases:
                return plan
        self._planned += len(metrics)
        if self._planned > _MOST_PLANNED:
            self._plans.clear()
            self._planned = len(metrics)
        shape = [*zip(metrics, labels, phases, strict=True)]
        routes = [self._routes.get(series) or self._route(series) for series in shape]
        plan = Plan(routes, twice=len(set(shape)) < len(shape))
        self._plans[metrics] = [*self._plans.get(metrics, ()), (labels, phases, plan)]
        return plan

    def plan_after(self, plan: Plan, made: Sequence[Sample]) -> Plan:
        """What to do with the derived samples of a plan's samples: always the same, where none of them is missing."""
        if len(made) < len(plan.derivations):
            return self.plan(made)
        if plan.after is None:
            plan.after = self.plan(made)
        return plan.after

    def _route(self, series: Series) -> Route:
        metric, labels, phase = series
        judges = judges_of(self._by_metric.get(metric, ()), labels, phase)
        always = [judge for judge in judges if judge[0].rule.every == 1]
        sides = self._lookups.sides(metric, labels)
        if sides:
            self.wake()  # rules that wait for this metric can be judged from now on
        route = self._routes[series] = Route(
            self._lookups.watch(metric, labels),
            Backlog(always, sides) if always or sides else None,
            tuple(judge for judge in judges if judge[0].rule.every != 1),
        )
        return route

    def settle(self) -> None:
        """Let every rule learn what it was spared."""
        for route in self._routes.values():
            if route.backlog is not None:
                route.backlog.settle()

    def wake(self) -> None:
        """Let every rule learn what it was spared, and look at the next values."""
        for route in self._routes.values():
            if route.backlog is not None:
                route.backlog.wake()

    def forget(self) -> None:
        """Series are made or restored: find all anew."""
        for route in self._routes.values():
            if route.backlog is not None:
                route.backlog.leave()
        self._routes.clear()
        self._plans.clear()
        self._planned = 0
