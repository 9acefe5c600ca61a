"""What rules want and where it goes: the metrics to measure, the rules that each sample reaches, and what rules look up beside their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, NamedTuple

from healthcheck.core.protocols import Comparator
from healthcheck.core.samples import NO_LABELS, Labels, Sample, decode_number, encode_number
from healthcheck.engine.rulestate import CauseState, Side
from healthcheck.engine.series import SeriesState
from healthcheck.rulelang.rule import Cause, Derived, Guard

NEVER = 2**62
"""A step that no run reaches."""


class RuleDemand:
    """Implements :class:`healthcheck.core.protocols.Demand`: metric key -> smallest ``every``."""

    def __init__(self) -> None:
        self.every: dict[str, int] = {}
        self.stretch: dict[str, int] = {}
        """Factors by which the overhead budget stretched ``every``."""
        self.due_now: AbstractSet[str] = self.every.keys()
        """Keys that are due at the step at hand, once there is one."""

    @classmethod
    def of(cls, rules: Iterable[Cause], derived: Iterable[Derived] = (), extra: Iterable[str] = ()) -> RuleDemand:
        """Demand of rules, of the derived metrics that they use, and of ``extra`` keys."""
        demand = cls()
        formulas = {d.name: d for d in derived}
        wanted: list[tuple[str, int]] = [(key, 1) for key in extra]
        for rule in rules:
            wanted.append((rule.selector.key, rule.every))
            wanted += [(guard.metric, 1) for guard in rule.only_if]
            wanted += [(s.key, rule.every) for s, _ in rule.condition.parts if s is not None]
        while wanted:
            key, every = wanted.pop()
            known = demand.every.get(key)
            # Of two rules the one that looks more often decides: the other takes every n-th of its samples.
            if known is not None and known <= every:
                continue
            demand.every[key] = every
            if key in formulas:
                wanted += [(name, 1) for name in formulas[key].inputs]
        return demand

    def wants(self, key: str) -> bool:
        return key in self.every

    def every_of(self, key: str) -> int:
        """Steps from one at which a wanted key is due to the next, as things stand."""
        return self.every[key] * self.stretch.get(key, 1)

    def due(self, key: str, step: int) -> bool:
        every = self.every.get(key)
        return every is not None and step % (every * self.stretch.get(key, 1)) == 0

    def next_due(self, keys: Iterable[str], step: int) -> int:
        """The first step after ``step`` at which one of ``keys`` is due; :data:`NEVER` if nobody wants them."""
        found = NEVER
        for key in keys:
            if key in self.every:
                every = self.every_of(key)
                found = min(found, step - step % every + every)
        return found


# --------------------------------------------------------------------------------------------------
# What rules look up beside their own samples: guards, derived metrics, parts on another metric.


class Question:
    """What several rules ask of one metric with the same words in ``only_if``."""

    __slots__ = ("answer", "states", "test", "words")

    def __init__(self, test: Comparator, states: list[CauseState]) -> None:
        self.words = test.text
        low, high = test.healthy.low, test.healthy.high
        self.test = low, high, None if test.exact else test
        """Values that do not hold, and who is asked about the others, if not all of them do."""
        self.states = states
        self.answer: bool | None = None
        """The last one."""


class Watch(NamedTuple):
    """What hangs on one series."""

    metric: str
    """Its name, if a guard or a formula looks it up; else empty."""
    questions: tuple[Question, ...]
    feeds: tuple[Callable[[float], None], ...]
    """Look-ups of its past in formulas."""
    sides: tuple[Side, ...]
    """Parts of rules on other metrics."""
    ready: tuple[Derived, ...]
    """Formulas that may have a value when this has one."""
    is_input: bool
    """Whether some formula looks at it."""


class Watched(NamedTuple):
    """What hangs on samples of one shape, each thing with the place of its sample."""

    last: tuple[tuple[int, str, tuple[Question, ...]], ...]
    """Metrics whose last value is remembered, and what guards ask of it."""
    inputs: tuple[tuple[int, str, tuple[Callable[[float], None], ...]], ...]
    """Metrics that formulas look at."""
    sides: tuple[tuple[int, tuple[Side, ...]], ...]
    derivations: tuple[tuple[int, Derived, Sample], ...]
    """Formulas that may have a value, each with the last sample that it waits for, which says when and where, and with
    the sample that it makes: one object for all steps, since nobody keeps it beyond its evaluation."""

    @classmethod
    def of(cls, watches: Sequence[tuple[int, Watch, str]]) -> Watched:
        """Gathered from some series, each given as ``(place of its sample, what hangs on it, phase)``, in their order."""
        last, inputs, sides, derivations = [], [], [], []
        waiting: dict[Derived, tuple[int, str]] = {}
        for place, watch, phase in watches:
            if watch.metric:
                last.append((place, watch.metric, watch.questions))
            if watch.is_input:
                inputs.append((place, watch.metric, watch.feeds))
            if watch.sides:
                sides.append((place, watch.sides))
            for formula in watch.ready:
                waiting[formula] = place, phase
        for formula, (place, phase) in waiting.items():
            derivations.append((place, formula, Sample(formula.name, 0, 0.0, NO_LABELS, phase)))
        return cls(tuple(last), tuple(inputs), tuple(sides), tuple(derivations))


class Lookups:
    """Remembers what some rule looks up; computes a derived metric where all its bare inputs are."""

    def __init__(self, states: Iterable[CauseState], derived: Sequence[Derived]) -> None:
        self.derived = list(derived)
        self.last: dict[str, float] = {}
        """Metric -> its last value, where a guard or a formula asks for it."""
        self._steps: dict[str, int] = {}
        """The steps of the last values that formulas ask for."""
        self._states = list(states)
        self._questions: dict[str, list[Question]] = {}
        """By metric: all that some guard asks of it."""
        for state in self._states:
            for guard in state.rule.only_if:
                self._add_question(guard, state)

    def _add_question(self, guard: Guard, state: CauseState) -> None:
        questions = self._questions.setdefault(guard.metric, [])
        if not _held_by_guards(state):
            return
        for question in questions:
            if question.words == guard.test.text:
                question.states.append(state)
                return
        questions.append(Question(guard.test, [state]))

    def watch(self, metric: str, labels: Labels) -> Watch | None:
        """What hangs on samples of one series; None if nothing does. Guards and formulas take plain metrics only."""
        sides = tuple(
            side
            for state in self._states
            for side in state.sides
            if side.selector.metric == metric and side.selector.matches(labels)
        )
        questions = None if labels else self._questions.get(metric)
        formulas = [] if labels else [formula for formula in self.derived if metric in formula.inputs]
        if not (sides or formulas or questions is not None):
            return None
        return Watch(
            metric if formulas or questions is not None else "",
            tuple(questions or ()),
            tuple(feed for formula in formulas for feed in formula.feeds(metric)),
            sides,
            tuple(formula for formula in formulas if metric in formula.triggers),
            bool(formulas),
        )

    def take(self, samples: Sequence[Sample], watched: Watched) -> list[Sample]:
        """Look at the samples of one evaluation before they are judged; returns the derived samples that they give.

        A derived metric has a value at a step when all its bare inputs have one there, whichever
        evaluation of that step brought them; it is computed once per evaluation, from the last.
        """
        last, steps = self.last, self._steps
        for index, metric, questions in watched.last:
            value = samples[index].value
            # Most guards look at settings that stay for a whole run: they are asked when the value changes. (NaN
            # differs from itself, so it is asked about each time.)
            changed = questions and last.get(metric) != value
            last[metric] = value
            if changed:
                for question in questions:
                    low, high, test = question.test
                    answer = (value < low or value > high) if test is None else test(value)
                    if answer is not question.answer:
                        question.answer = answer
                        self._open_or_shut(question.states)
        # All windows of formulas are fed before one is computed: formulas may look at each other's inputs.
        for index, metric, feeds in watched.inputs:
            sample = samples[index]
            steps[metric] = sample.step
            for feed in feeds:
                feed(sample.value)
        for index, sides in watched.sides:
            sample = samples[index]
            value = sample.value
            for side in sides:
                if side.settled:
                    side.breach = not side.low <= value <= side.high
                else:
                    side.score(value, sample.step)
        made = []
        for index, formula, derived in watched.derivations:
            sample = samples[index]
            step = sample.step
            for name in formula.triggers:
                if steps.get(name) != step:
                    break
            else:
                value = formula.compute(last.get)
                if value is not None:
                    derived.step, derived.value, derived.time = step, value, sample.time
                    made.append(derived)
        return made

    def _open_or_shut(self, states: Iterable[CauseState]) -> None:
        """Whether the guards of these rules hold, all of them."""
        for state in states:
            state.shut = not self._holds(state)

    def _holds(self, state: CauseState) -> bool:
        """A guard without samples counts as satisfied."""
        last = self.last
        return all(guard.metric not in last or guard.test(last[guard.metric]) for guard in state.rule.only_if)

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "derived": {d.name: {"text": d.text, "state": d.state()} for d in self.derived},
            "last": {name: [self._steps.get(name), encode_number(value)] for name, value in self.last.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore; returns one sentence for each derived metric that starts fresh."""
        reasons = []
        for formula in self.derived:
            fresh = formula.state()
            try:
                entry = saved["derived"].get(formula.name)
                if entry is not None and entry["text"] == formula.text:
                    formula.restore(entry["state"])
            except Exception as error:  # as for rules: one that cannot be read must not take the others with it
                formula.restore(fresh)
                reasons.append(
                    f"{formula.name} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
                )
        self.last = {name: decode_number(value) for name, (_, value) in saved["last"].items()}
        self._steps = {name: int(step) for name, (step, _) in saved["last"].items() if step is not None}
        for questions in self._questions.values():
            for question in questions:
                question.answer = None
                self._open_or_shut(question.states)
        return reasons


def _held_by_guards(state: CauseState) -> bool:
    """Not so rules on absence and on siblings: these are judged as they come."""
    return not (state.across or state.rule.condition.absence)


# --------------------------------------------------------------------------------------------------
# Where the samples of one evaluation go: worked out once, then reused while the same series come.


Series = tuple[str, Labels, str]
"""Metric, labels, phase."""

Judge = tuple[CauseState, "SeriesState | None"]
"""A rule and its state of one series. None: it watches absence, or its guards have not held yet."""

Look = tuple[int, Sequence[Judge]]
"""The place of a sample, and who judges it."""

SERIES = attrgetter("metric", "labels", "phase")
"""The series of a sample."""
_MOST_PLANNED = 100_000
"""Samples in all plans together: runs whose samples come in ever new shapes must not fill the memory."""


def judges_of(states: Iterable[CauseState], labels: Labels, phase: str) -> list[Judge]:
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
    always: tuple[Judge, ...]
    """Rules that judge every sample, in file order."""
    paused: tuple[Judge, ...]
    """Rules with ``every``."""


class Plan:
    """What is done with samples of one shape: the series that came, in their order.

    Rules with ``every`` pause between two of their buckets: until step ``due`` only the others are asked.
    """

    __slots__ = ("_paused", "always", "due", "following", "shape", "watched")

    def __init__(self, shape: tuple[Series, ...], routes: Sequence[Route]) -> None:
        self.shape = shape
        self.following: Plan | None = None
        """The plan for the derived samples, where every formula had a value."""
        self.always: list[Look] = []
        self._paused: list[Look] = []
        watches: list[tuple[int, Watch, str]] = []
        for index, route in enumerate(routes):
            if route.always:
                self.always.append((index, route.always))
            if route.paused:
                self._paused.append((index, route.paused))
            if route.watch is not None:
                watches.append((index, route.watch, shape[index][2]))
        self.watched = Watched.of(watches) if watches else None
        self.due = 0 if self._paused else NEVER

    def with_due(self, samples: Sequence[Sample]) -> list[Look]:
        """The others and those with ``every`` whose turn it is; none of them has anything to do before the new ``due``.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.
        """
        looks, due = self.always[:], NEVER
        for index, judges in self._paused:
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

    def __init__(self, states: Iterable[CauseState], lookups: Lookups) -> None:
        super().__init__()
        self._by_metric: dict[str, list[CauseState]] = {}
        for state in states:
            self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        self._lookups = lookups
        self._routes: dict[Series, Route] = {}
        self._planned = 0
        self.latest: dict[int, Plan] = {}
        self.met: Callable[[str, Labels], None] | None = None
        """Hears of each series when it is seen for the first time, before it is judged."""

    def __missing__(self, shape: tuple[Series, ...]) -> Plan:
        """Work out what to do with samples of a new shape."""
        # Whoever logs other metrics at each step would fill the memory with plans that are used once.
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
        if self.met is not None:
            self.met(metric, labels)
        judges = judges_of(self._by_metric.get(metric, ()), labels, phase)
        always: list[Judge] = []
        paused: list[Judge] = []
        for judge in judges:
            (always if judge[0].rule.every == 1 else paused).append(judge)
        route = self._routes[series] = Route(self._lookups.watch(metric, labels), tuple(always), tuple(paused))
        return route

    def forget(self) -> None:
        """Series are made or restored: find all anew."""
        self._routes.clear()
        self.clear()
        self.latest.clear()
        self._planned = 0
