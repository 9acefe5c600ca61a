"""What rules need beside their own samples: guards, derived metrics, parts on another metric; and which metrics that makes.

Looked at before any rule is judged: a rule sees them as of its own step, wherever in the file it stands. For a block that
means: what they say at each of its moments is worked out first, and where that changes the runs of a rule are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from healthcheck.core.names import AgentNames
from healthcheck.core.protocols import Comparator
from healthcheck.core.samples import NO_LABELS, Labels, Series
from healthcheck.core.text import decode_number, encode_number
from healthcheck.engine.columns import Column, Looked, Moment, Question, Run, Watch, merged
from healthcheck.engine.rulestate import CauseState, Side
from healthcheck.rulelang.rule import Cause, Derived, Guard


class Inputs:
    """One formula and what it looks at."""

    __slots__ = ("feeds", "formula", "late", "level", "looked", "order", "pasts", "series", "triggers")

    def __init__(self, formula: Derived, order: int, looked: Mapping[str, Looked], level: int) -> None:
        self.formula = formula
        self.order = order
        self.level = level
        self.triggers = [looked[name] for name in formula.triggers]
        self.pasts = [looked[name] for name in formula.remembers]
        self.looked = list(dict.fromkeys([*self.triggers, *self.pasts]))
        self.late = frozenset(past.metric for past in self.pasts if past.level >= level)
        """Look-ups of what is computed later than this: it sees those of the evaluation before."""
        self.feeds = [(past, formula.feeds(past.metric)) for past in self.pasts]
        self.series: dict[str, Series] = {}
        """By phase: the series that it makes."""


class Lookups:
    """Remembers what some rule looks up; computes a derived metric where all its bare inputs are."""

    def __init__(self, states: Iterable[CauseState], derived: Sequence[Derived]) -> None:
        self.derived = list(derived)
        self.last: dict[str, float] = {}
        """Metric -> its last value, where a guard or a formula asks for it."""
        self._steps: dict[str, int] = {}
        """The steps of the last values that formulas ask for."""
        self._since: dict[str, int] = {}
        """For what came for the first time in the block at hand, the moment."""
        self._states = list(states)
        self._looked: dict[str, Looked] = {}
        self._asked: dict[int, list[Question]] = {}
        """By place of its state: all that a rule's guards ask."""
        self._place = {id(state): place for place, state in enumerate(self._states)}
        for state in self._states:
            for guard in state.cause.only_if:
                self._add_question(guard, state)
        # Each formula comes after those that it looks at.
        self.formulas: list[Inputs] = []
        levels: dict[str, int] = {}
        for order, formula in enumerate(self.derived):
            level = levels[formula.name] = 1 + max(levels.get(name, 0) for name in formula.triggers)
            for name in formula.inputs:
                looked = self._of(name)
                looked.is_input, looked.level = True, levels.get(name, 0)
            self.formulas.append(Inputs(formula, order, self._looked, level))

    def _of(self, metric: str) -> Looked:
        return self._looked.setdefault(metric, Looked(metric))

    def _add_question(self, guard: Guard, state: CauseState) -> None:
        looked = self._of(guard.metric)
        if not _held_by_guards(state):
            return
        question = next((q for q in looked.questions if q.words == guard.test.text), None)
        if question is None:
            question = Question(guard.test, [])
            looked.questions.append(question)
        question.states.append(state)
        self._asked.setdefault(self._place[id(state)], []).append(question)

    def watch(self, metric: str, labels: Labels) -> Watch | None:
        """What hangs on samples of one series; None if nothing does. Guards and formulas take plain metrics only."""
        sides = tuple(
            (state, side)
            for state in self._states
            for side in state.sides
            if side.selector.metric == metric and side.selector.matches(labels)
        )
        looked = None if labels else self._looked.get(metric)
        return Watch(looked, sides) if sides or looked is not None else None

    def known_at(self, at: int) -> set[str]:
        """The metrics that were known at a moment of the block at hand."""
        return {name for name in self.last if self._since.get(name, -1) <= at}

    # -- a block ------------------------------------------------------------------------

    def take(
        self, columns: list[Column], moments: Sequence[Moment], column_of: Callable[[Series], Column]
    ) -> list[CauseState]:
        """Look at the samples of a block before they are judged; adds the columns of derived metrics.

        A derived metric has a value at a step when all its bare inputs have one there, whichever evaluation of that
        step brought them; it is computed once per evaluation, from the last.

        Returns the rules for which a guard or a part changes in this block: see :attr:`CauseState.changes`.
        """
        came: list[Looked] = []
        sides: dict[Side, tuple[CauseState, list[Column]]] = {}
        changed: dict[int, CauseState] = {}
        single = len(moments) == 1
        self._sort(columns, single, came, sides, changed)
        if self._since:
            self._since = {}
        if not came and not sides:
            return list(changed.values())
        for inputs in self.formulas:
            for looked in inputs.triggers:
                if looked.columns:
                    break
            else:
                for looked, feeds in inputs.feeds:
                    if looked.columns:
                        values = merged(looked.columns, moments)[0]
                        for feed in feeds:
                            feed(values)
                continue
            derived = self._derive(inputs, moments, column_of)
            if derived:
                columns.extend(derived)
                self._sort(derived, single, came, sides, changed)
        last = self.last
        answers: list[tuple[int, Question, bool]] = []
        for looked in came:
            its = looked.columns
            values, steps, at = (its[0].values, its[0].steps, its[0].at) if len(its) == 1 else merged(its, moments)
            looked.columns = []
            metric, newest = looked.metric, values[-1]
            before = last.get(metric)
            if before is None:
                self._since[metric] = at[0]
            # Most guards look at settings that stay for a whole run: they are asked when the value changes. (NaN differs
            # from itself, so it is asked about each time.)
            if looked.questions and (newest != before or (len(values) > 1 and values.count(before) < len(values))):
                _ask(looked.questions, before, values, at, answers)
            last[metric] = newest
            if looked.is_input:
                self._steps[metric] = steps[-1]
        if answers:
            self._open_or_shut(answers, changed)
        for side, (state, its) in sides.items():
            values, steps, at = (its[0].values, its[0].steps, its[0].at) if len(its) == 1 else merged(its, moments)
            said = side.breach
            if side.settled:
                low, high = (values[0], values[0]) if len(values) == 1 else (min(values), max(values))
                # NaN breaches, and of a run with NaN neither end can be trusted: it is asked value by value.
                total = sum(values)
                if len(values) == 1 or total - total == 0.0:
                    if said is False and side.low <= low and high <= side.high:
                        continue
                    if said is True and (low > side.high or high < side.low):
                        continue
            for moment, breach in zip(at, side.run(values, steps), strict=True):
                if breach is not said:
                    _change(state, moment, side, said, breach)
                    changed[id(state)] = state
                    said = breach
        for state in changed.values():
            state.changes.sort(key=_moment)  # guards and parts were looked at one after the other
        return list(changed.values())

    def _sort(
        self,
        columns: Sequence[Column],
        single: bool,
        came: list[Looked],
        sides: dict[Side, tuple[CauseState, list[Column]]],
        changed: dict[int, CauseState],
    ) -> None:
        """Put columns where they are looked at: with their metric, and with the parts of rules on another metric.

        Of a single evaluation these parts are asked at once. ``came``, ``sides`` and ``changed`` are added to.
        """
        for column in columns:
            watch = column.watch
            if watch is None:
                continue
            if watch.looked is not None:
                if not watch.looked.columns:
                    came.append(watch.looked)
                watch.looked.columns.append(column)
            if single:
                for state, side in watch.sides:
                    before = side.breach
                    if side.settled and len(column.values) == 1:
                        after: bool | None = not side.low <= column.values[0] <= side.high
                        side.breach = after
                    else:
                        after = side.run(column.values, column.steps)[-1]
                    if after is not before:
                        _change(state, 0, side, before, after)
                        changed[id(state)] = state
                continue
            for state, side in watch.sides:
                if side in sides:
                    sides[side][1].append(column)
                else:
                    sides[side] = state, [column]

    def recover(self) -> list[CauseState]:
        """After :meth:`take` has raised: the block is judged without what it would have said."""
        for looked in self._looked.values():
            looked.columns = []
        return [state for state in self._states if state.changes]

    def _open_or_shut(self, answers: list[tuple[int, Question, bool]], changed: dict[int, CauseState]) -> None:
        """Note where the guards of rules begin or cease to hold, all of them."""
        answers.sort(key=_moment)
        shut: dict[int, bool] = {}
        for at, question, answer in answers:
            question.answer = answer
            for state in question.states:
                before = shut.get(id(state), state.shut)
                after = any(q.answer is False for q in self._asked[self._place[id(state)]])
                if after is not before:
                    _change(state, at, state, before, after)
                    changed[id(state)] = state
                    shut[id(state)] = after

    # -- formulas -------------------------------------------------------------------------

    def _derive(
        self, inputs: Inputs, moments: Sequence[Moment], column_of: Callable[[Series], Column]
    ) -> Sequence[Column]:
        """The samples of one formula in this block, sorted into columns by phase."""
        first = inputs.triggers[0].columns
        if len(inputs.looked) == 1 and len(first) == 1 and len(first[0].at) == 1:  # one value of one metric
            only = first[0]
            computed = inputs.formula.run({inputs.triggers[0].metric: only.values}, 1, ())
            if computed[0] is None:
                return ()
            phase = only.series[2]
            series = inputs.series.get(phase)
            if series is None:
                series = inputs.series[phase] = (inputs.formula.name, NO_LABELS, phase)
            column = column_of(series)
            if not column.at:
                column.order = inputs.order
                column.values, column.steps, column.at = computed, only.steps, only.at  # type: ignore[assignment]
                return (column,)
        by_phase: Mapping[str, Run]
        if len(first) == 1 and self._aligned(inputs, first[0]):
            only = first[0]
            values, steps, at = only.values, only.steps, only.at
            given = {one.metric: one.columns[0].values for one in inputs.looked if one.columns}
            computed = inputs.formula.run(given, len(at), inputs.late)
            if None in computed:
                kept = [place for place, value in enumerate(computed) if value is not None]
                if not kept:
                    return ()
                computed, steps, at = [computed[p] for p in kept], [steps[p] for p in kept], [at[p] for p in kept]
            by_phase = {only.series[2]: (computed, steps, at)}  # type: ignore[dict-item]
        else:
            runs = {one.metric: merged(one.columns, moments) for one in inputs.looked if one.columns}
            by_phase = self._by_moment(inputs, runs, moments)
        found = []
        for phase, (values, steps, at) in by_phase.items():
            series = inputs.series.get(phase)
            if series is None:
                series = inputs.series[phase] = (inputs.formula.name, NO_LABELS, phase)
            column = column_of(series)
            column.order = inputs.order
            if not column.at:
                column.values, column.steps, column.at = values, steps, at
                found.append(column)
                continue
            # Somebody logs a metric of this name as well.
            both = [*zip(column.at, column.steps, column.values, strict=True), *zip(at, steps, values, strict=True)]
            both.sort(key=_moment)
            column.at = [entry[0] for entry in both]
            column.steps = [entry[1] for entry in both]
            column.values = [entry[2] for entry in both]
        return found

    def _aligned(self, inputs: Inputs, first: Column) -> bool:
        """The usual case: all that the formula looks at came together, in one phase, once each."""
        if len(inputs.looked) == 1:
            return len(first.at) == 1 or type(first.at) is range or len(set(first.at)) == len(first.at)
        steps, at, phase = first.steps, first.at, first.series[2]
        for one in inputs.looked:
            if not one.columns and one not in inputs.triggers:
                continue
            if len(one.columns) != 1:
                return False
            other = one.columns[0]
            if other.at is not at and list(other.at) != list(at):
                return False
            if one in inputs.triggers and (other.series[2] != phase or list(other.steps) != list(steps)):
                return False
        return type(at) is range or len(set(at)) == len(at)

    def _by_moment(
        self, inputs: Inputs, runs: Mapping[str, Run], moments: Sequence[Moment]
    ) -> dict[str, tuple[list[float], list[int], list[int]]]:
        """The samples, moment by moment, where samples come as they like."""
        formula = inputs.formula
        current = {name: self.last.get(name) for name in formula.triggers}
        stepped = {name: self._steps.get(name) for name in formula.triggers}
        at_hand = dict.fromkeys(runs, 0)
        due = sorted({at for one in inputs.triggers if one.metric in runs for at in runs[one.metric][2]})
        found: dict[str, tuple[list[float], list[int], list[int]]] = {}

        def advance(one: Looked, until: int) -> None:
            """Give the formula what came of a metric before the moment ``until``."""
            values, steps, at = runs[one.metric]
            begin = end = at_hand[one.metric]
            while end < len(at) and at[end] < until:
                end += 1
            if end > begin:
                at_hand[one.metric] = end
                current[one.metric], stepped[one.metric] = values[end - 1], steps[end - 1]
                for feed in formula.feeds(one.metric):
                    feed(values[begin:end])

        arrived = [one for one in inputs.looked if one.metric in runs]
        for moment in due:
            for one in arrived:
                advance(one, moment + 1 if one.level < inputs.level else moment)
            newest = max(
                (
                    (one.level, *column.sample(moments, _last_place(column.at, moment)), column)
                    for one in inputs.triggers
                    for column in one.columns
                    if moment in (column.at)
                ),
                key=lambda entry: entry[:2],
            )
            step, phase = newest[2].step, newest[2].phase
            if all(stepped[name] == step for name in formula.triggers):
                value = formula.compute(current.get)
                if value is not None:
                    values, steps, at = found.setdefault(phase, ([], [], []))
                    values.append(value)
                    steps.append(step)
                    at.append(moment)
        for one in arrived:
            advance(one, len(moments))
        return found

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
        for looked in self._looked.values():
            for question in looked.questions:
                known = looked.metric in self.last
                question.answer = _holds(question.test, self.last[looked.metric]) if known else None
        for place, questions in self._asked.items():
            self._states[place].shut = any(question.answer is False for question in questions)
        return reasons


def _change(state: CauseState, at: int, whose: CauseState | Side, before: bool | None, after: bool | None) -> None:
    """Note for a cause that from a moment of the block at hand on, a guard or a part says something else."""
    if all(known is not whose for known, _ in state.starts):
        state.starts.append((whose, before))
    state.changes.append((at, whose, after))


def _held_by_guards(state: CauseState) -> bool:
    """Not so rules on absence and on siblings: these are judged as they come."""
    return not (state.across or state.cause.condition.absence)


def _holds(test: Comparator, value: float) -> bool:
    return (value < test.healthy.low or value > test.healthy.high) if test.exact else test(value)


def _ask(
    questions: Sequence[Question],
    before: float | None,
    values: Sequence[float],
    at: Sequence[int],
    answers: list[tuple[int, Question, bool]],
) -> None:
    """What the values of a block answer, where that changes."""
    for question in questions:
        said, old, test = question.answer, before, question.test
        exact, low, high = test.exact, test.healthy.low, test.healthy.high
        for place, value in enumerate(values):
            if value == old:
                continue
            old = value
            answer = (value < low or value > high) if exact else test(value)
            if answer is not said:
                said = answer
                answers.append((at[place], question, answer))


def _last_place(at: Sequence[int], moment: int) -> int:
    return len(at) - 1 - list(reversed(at)).index(moment)


def _moment(entry: tuple[int, Any, Any]) -> int:
    return entry[0]


# --------------------------------------------------------------------------- which metrics that makes, and how often

NEVER = 2**62
"""A step that no run reaches."""


class RuleDemand:
    """Implements :class:`healthcheck.core.protocols.Demand`: metric key -> smallest ``every``."""

    def __init__(self) -> None:
        self.every: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        """What takes the place of ``every`` once the run has settled."""
        self.has_settled = False
        self.stretch: dict[str, int] = {}
        """Factors by which the overhead budget stretched ``every``."""
        self.agents = AgentNames(self)
        """For what scripts log: which names mean a metric that is wanted."""
        self.due_now: AbstractSet[str] = self.every.keys()
        """Keys that are due at the step at hand, once there is one."""

    @classmethod
    def of(cls, rules: Iterable[Cause], derived: Iterable[Derived] = (), extra: Iterable[str] = ()) -> RuleDemand:
        """Demand of rules, of the derived metrics that they use, and of ``extra`` keys."""
        demand = cls()
        formulas = {d.name: d for d in derived}
        wanted: list[tuple[str, int, int]] = [(key, 1, 1) for key in extra]
        for rule in rules:
            pace = rule.every, rule.settled_every or rule.every
            wanted.append((rule.selector.key, *pace))
            wanted += [(guard.metric, *pace) for guard in rule.only_if]
            wanted += [(s.key, *pace) for s, _ in rule.condition.parts if s is not None]
        while wanted:
            key, every, settled = wanted.pop()
            known = demand.every.get(key, NEVER), demand._settled.get(key, NEVER)
            # Of two rules the one that looks more often decides: the other takes every n-th of its samples.
            pace = min(every, known[0]), min(settled, known[1])
            if pace == known:
                continue
            demand.every[key], demand._settled[key] = pace
            if key in formulas:
                wanted += [(name, 1, 1) for name in formulas[key].inputs]
        return demand

    def take(self, other: RuleDemand) -> None:
        """Want what ``other`` does from now on, and nothing else."""
        self.every.clear()
        self._settled = dict(other._settled)
        self.every.update(other._settled if self.has_settled else other.every)

    def settle(self) -> bool:
        """So many steps were made that some metrics are wanted less often from now on; False if none is."""
        changed = any(self.every.get(key, settled) != settled for key, settled in self._settled.items())
        self.has_settled = True
        self.every.update(self._settled)
        return changed

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
                every = self.every[key] * self.stretch.get(key, 1)
                found = min(found, step - step % every + every)
        return found
