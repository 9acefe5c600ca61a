"""The engine: one evaluation at a time, in a fixed order, and what it brings: transitions, alerts, and actions to run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from healthcheck.core.alerts import Alert, Severity, Transition
from healthcheck.core.errors import StateError
from healthcheck.core.samples import BETWEEN, Labels, Row, Sample, Series
from healthcheck.engine.columns import Column, Judge, Moment, Shapes, across_phases
from healthcheck.engine.lookups import Lookups
from healthcheck.engine.routes import NEVER
from healthcheck.engine.rulestate import RuleState, Side
from healthcheck.engine.series import AGAIN, CHANGED, Mark, SeriesState
from healthcheck.rulelang.rule import ActionSpec, Mute, Rule, RuleSet, owners


@dataclass(slots=True)
class PlannedAction:
    """One action for one alert. ``held`` says why it must not run, or is empty."""

    rule: Rule
    alert: Alert
    spec: ActionSpec
    held: str = ""


@dataclass(slots=True)
class Evaluation:
    """What one evaluation brought. Empty most of the time."""

    step: int = 0
    """The step of the evaluation."""
    alerts: list[Alert] = field(default_factory=list)
    """New episodes and repeats under ``cooldown``, in file order."""
    cleared: list[Alert] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    plan: list[PlannedAction] = field(default_factory=list)
    """Actions in the order in which they must run."""

    def __bool__(self) -> bool:
        return bool(self.alerts or self.cleared or self.transitions)


NOTHING = Evaluation()
NAN = float("nan")


def explain(acting: Iterable[tuple[RuleState, Alert]], states: Iterable[RuleState]) -> None:
    """Mark alerts whose cause is an alert of another rule that fires now (``explains``)."""
    # Rules that have been firing for long explain as well as those that fire now.
    firing = [state.rule for state in states if state.firing]
    for _, alert in acting:
        alert.explained_by = next((rule.id for rule in firing if alert.rule in rule.explains), "")


def mute(alert: Alert, mutes: Iterable[Mute], hits: dict[int, int]) -> None:
    """Mark an alert that a mute covers; ``hits`` counts what each mute was good for."""
    for index, entry in enumerate(mutes):
        if entry.covers(alert.rule, alert.fired_step):
            alert.muted = entry.reason
            hits[index] = hits.get(index, 0) + 1


def cap(rule: Rule, alert: Alert, seen: Collection[str], known: Collection[str]) -> None:
    """In a record that cannot know a rule's guard, no alert of that rule is more than a warning."""
    unsaid = [
        guard.metric
        for guard in rule.only_if
        if guard.metric not in seen and guard.metric not in known and guard.test.text != "absent"
    ]
    if unsaid and alert.severity > Severity.WARNING:
        alert.severity = min(alert.severity, Severity.WARNING)
        alert.facts.setdefault("capped", "the record does not say " + ", ".join(unsaid))


def message(rule: Rule, alert: Alert) -> str:
    """The rule's message, its placeholders filled in."""
    assert rule.message is not None, "the rule compiler gives every rule a message"
    fields: dict[str, Any] = {
        "value": alert.value,
        "score": alert.score,
        "normal": alert.normal,
        "threshold": alert.threshold,
        "window": rule.condition.window,
        "step": alert.fired_step,
        "epoch": None,
        "rule": alert.rule,
        "series": alert.series[0].name if alert.series else rule.selector.metric,
        "rank": alert.rank,
        "count": alert.count,
    }
    return rule.message(fields)


def plan_actions(acting: list[tuple[RuleState, Alert]], step: int) -> list[PlannedAction]:
    """All actions of one evaluation, in file order; the caller sorts them by stage.

    An alert that another explains, that is muted, or that returns within its ``cooldown`` keeps
    its actions in the plan, held: the report says what would have been done.
    """
    plan = []
    for state, alert in acting:
        held = _why_held(state, alert, step)
        # What is held back is no run: `after: 2` counts what was done, and `cooldown` begins with it.
        if not held:
            state.action_runs += 1
            state.last_action_step = step
        for spec in state.rule.actions:
            if not held and state.action_runs < spec.after:
                continue
            plan.append(PlannedAction(state.rule, alert, spec, held))
    return plan


def _why_held(state: RuleState, alert: Alert, step: int) -> str:
    if alert.muted:
        return f"muted: {alert.muted}"
    if alert.explained_by:
        return f"explained by {alert.explained_by}"
    cooldown = state.rule.cooldown
    if cooldown is not None and state.last_action_step is not None and step - state.last_action_step < cooldown:
        return f"within the cooldown of {cooldown} steps"
    return ""


# --------------------------------------------------------------------------------------------------
# The engine: several evaluations at a time, each as if it had been judged alone.
#
# 1. sort the samples into series, 2. look at guards and other metrics and compute derived metrics, 3. judge **all** rules,
# series by series, 4. evaluation by evaluation and there in file order: apply ``explains`` and mutes, hand out alerts and
# the action plan. Nothing here knows torch, a file or the time of day: steps and clocks come in as arguments.


STATE_VERSION = 3
"""Of :meth:`Engine.state_dict`."""


class Engine:
    """Judges samples by rules.

    :param rules: a compiled rule set.
    :param rank: rules with ``ranks: zero`` are judged on rank 0 only.
    :param start_step: the step after which this run begins (after a resume), for ``warmup``.
    :param recorded: True when a record is replayed: a guard whose metric the record does not
        know caps its rule at warning instead of counting as satisfied, and the absence of a metric
        that the record never had is not judged.
    :param known: metrics that the record would hold if they had existed (what the live run was
        asked to collect).
    :param watch_transitions: collect every change of state, not only alerts.
    :param every_score: keep the score of each sample, for who wants to see them all. Otherwise a series knows that of
        the last sample which could have changed something.
    """

    def __init__(
        self,
        rules: RuleSet,
        *,
        rank: int = 0,
        start_step: int = 0,
        recorded: bool = False,
        known: Collection[str] = (),
        watch_transitions: bool = False,
        every_score: bool = False,
    ) -> None:
        self.rank = rank
        self.recorded = recorded
        self.known = frozenset(known)
        self.watch_transitions = watch_transitions
        self.mutes: list[Mute] = list(rules.mutes)
        self.mute_hits: dict[int, int] = {}
        self.alerts: list[Alert] = []
        self.step = start_step
        self.now = 0.0
        """The clock at the last evaluation, in seconds of active training."""
        self._owner = owners(rules.rules, rules.derived)
        states = [
            RuleState(rule, start_step, excused=rule.id in self._owner, every_score=every_score)
            for rule in rules.rules
            if self._mine(rule)
        ]
        self.states = states
        """All rules, in file order."""
        self.by_id = {state.rule.id: state for state in states}
        self._place = {state.rule.id: i for i, state in enumerate(states)}
        # Absence is judged by the clock and siblings by what came together: both stand outside the routes of samples.
        self._absent_steps = [state for state in states if state.rule.condition.absence == "steps"]
        self._absent_seconds = [state for state in states if state.rule.condition.absence == "seconds"]
        self._grouped = [state for state in states if state.across]
        self.lookups = Lookups(states, rules.derived)
        self._by_metric: dict[str, list[RuleState]] = {}
        for state in states:
            self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        self._shapes = Shapes(self._column)
        self.failures: list[Exception] = []
        """What conditions have raised; whoever calls :meth:`judge` takes them from here, after what it returned."""
        self.restarts = 0
        """How often states were restored or rewound: what somebody has worked out from them holds no longer then."""

    def _mine(self, rule: Rule) -> bool:
        return rule.ranks != "zero" or self.rank == 0

    # -- evaluating -------------------------------------------------------------------

    def evaluate(self, step: int, samples: Sequence[Sample], now: float) -> Evaluation:
        """Judge the samples of one event: a block of one; see :class:`Moment`."""
        found = self.judge((Moment(step, samples, now),))
        if self.failures:
            raise self.failures.pop()
        return found[0] if found else NOTHING

    def judge(self, moments: Sequence[Moment]) -> Sequence[Evaluation]:
        """Judge a block of evaluations, oldest first. How a stream is cut into blocks does not matter.

        Returns what was found, evaluation by evaluation; nothing for those that brought nothing.
        """
        for place, moment in enumerate(moments):
            given = moment[1]
            if type(given) is not Row and given and given[0].phase == BETWEEN:
                return self._judge_between(moments, place)
        self.step, _, self.now, _ = moments[-1]
        shapes = self._shapes
        columns = shapes.gather(moments, whole=bool(self._grouped))
        marks: _Marks = []
        changed: list[RuleState] = []
        try:
            if columns:
                changed = self.lookups.take(columns, moments, shapes.column)
        except Exception as error:  # a condition of somebody's: the rules that do not need it are judged all the same
            self.failures.append(error)
            changed = self.lookups.recover()
        if shapes.plain:
            self._judge_singly(shapes.plain, marks, moments)
        clocks: list[float] | None = None
        absent: list[tuple[RuleState, Column]] = []
        for column in columns if not shapes.several_phases else across_phases(columns, moments):
            values, steps, at = column.values, column.steps, column.at
            count = len(values)
            if count == 1:
                low = high = values[0]
                finite = low - low == 0.0
            else:
                total = sum(values)
                finite = total - total == 0.0
                low, high = (min(values), max(values)) if finite else (NAN, NAN)
            times: Sequence[float] | None = None
            if column.paused and (top := steps[-1] if count == 1 else max(steps)) >= column.due:
                self._take_turns(column, top, marks, moments)
            for state, series in column.always:
                # Most samples change nothing, and calls are what costs: those are noted here.
                if series is not None and not state.changes and not state.shut:
                    if series.idle_from <= low and high <= series.idle_to:
                        series.n += count
                        series.last_step = steps[-1]
                        series.value = values[-1]
                        continue
                    if finite or series.nonfinite_ok:
                        try:
                            found = series.update(values, steps, series.quiet)
                            if not found:
                                series.n += count
                                series.last_step = steps[-1]
                                series.value = values[-1]
                                continue
                            if times is None:
                                if clocks is None:
                                    clocks = [moment[2] for moment in moments]
                                whole = type(at) is range and count == len(clocks)
                                times = clocks if whole else [clocks[moment] for moment in at]
                            changes = series.take(found, values, steps, times, 0, count)
                        except Exception as error:
                            self.failures.append(error)
                            continue
                        if changes:
                            self._mark(state, column, None, changes, marks, moments)
                        continue
                self._judge_column(state, column, marks, moments)
            if column.absent:
                absent += [(state, column) for state in column.absent]
        if absent or self._absent_steps or (self._absent_seconds and (len(moments) > 1 or moments[0][3] is not None)):
            self._judge_absence(absent, marks, moments)
        if self._grouped:
            self._judge_groups(columns, marks, moments)
        for column in columns:
            column.at = ()
        for state in changed:
            for _, whose, said in state.changes:
                _say(whose, said)
            state.changes, state.starts = [], []
        if not marks:
            return ()  # nearly always
        return self._conclude_all(marks, moments)

    def _judge_between(self, moments: Sequence[Moment], place: int) -> Sequence[Evaluation]:
        """A block of which one evaluation is of a step that nobody watched: its values are judged if they break a bound."""
        found = [*self.judge(moments[:place])] if place else []
        step, samples, now, _ = moments[place]
        judged = [
            Sample(one.metric, one.step, one.value, one.labels, "train", one.time, one.detail)
            for one in samples
            if self._breaks_a_bound(one)
        ]
        rest = [*([Moment(step, judged, now)] if judged else ()), *moments[place + 1 :]]
        return [*found, *(self.judge(rest) if rest else ())]

    def _breaks_a_bound(self, sample: Sample) -> bool:
        for state in self._by_metric.get(sample.metric, ()):
            series = state.series.get(sample.labels)
            if series is None or state.shut or state.phase not in ("any", "train"):
                continue
            bound = series.bound(sample.step)
            if bound is not None and not bound.low <= sample.value <= bound.high:
                return True
        return False

    def _judge_singly(self, plain: Sequence[tuple[int, Column]], marks: _Marks, moments: Sequence[Moment]) -> None:
        """What the loop of :meth:`judge` does, for samples that need not be sorted into columns first.

        Where steps are long each is a block of its own, and to sort would be most of the work.
        """
        _, samples, now, _ = moments[0]
        for index, column in plain:
            sample = samples[index]
            value, step = sample.value, sample.step
            values: tuple[float, ...] | None = None
            for state, series in column.always:
                if series is None or state.changes or state.shut:
                    column.values, column.steps, column.at = (value,), (step,), (0,)
                    self._judge_column(state, column, marks, moments)
                    column.at = ()
                    continue
                if series.idle_from <= value <= series.idle_to:
                    series.n += 1
                    series.last_step = step
                    series.value = value
                    continue
                # The run of one sample is made once for all that judge it, and not at all if nobody needs it.
                if values is None:
                    values, steps, finite = (value,), (step,), value - value == 0.0
                try:
                    if finite or series.nonfinite_ok:
                        found = series.update(values, steps, series.quiet)
                        if not found:
                            series.n += 1
                            series.last_step = step
                            series.value = value
                            continue
                        changes = series.take(found, values, steps, (now,), 0, 1)
                    else:
                        changes = series.run(values, steps, (now,))
                except Exception as error:
                    self.failures.append(error)
                    continue
                order = self._place[state.rule.id]
                marks += [
                    (0, order, index, m, sample) for m in changes if m.result != CHANGED or self.watch_transitions
                ]

    # -- which rules judge what -------------------------------------------------------

    def _column(self, series: Series) -> Column:
        """Who judges samples of a series that was not seen before."""
        metric, labels, phase = series
        always: list[Judge] = []
        paused: list[Judge] = []
        absent: list[RuleState] = []
        for state in self._by_metric.get(metric, ()):
            if state.phase not in ("any", phase) or state.across:
                continue
            if state.rule.condition.absence:
                if state.rule.selector.matches(labels):
                    absent.append(state)
                continue
            if state.rule.only_if and labels not in state.series:
                if not state.rule.selector.matches(labels):
                    continue
                one = None  # a series is made when its guards hold for the first time
            else:
                one = state.state_of(labels)
                if one is None:
                    continue
            (always if state.rule.every == 1 else paused).append((state, one))
        return Column(series, self.lookups.watch(metric, labels), always, paused, absent)

    def _met(self, state: RuleState, column: Column) -> SeriesState | None:
        """The guards of a rule hold for the first time: from now on it has its series."""
        series = state.state_of(column.series[1])
        column.always = [(s, series if s is state else known) for s, known in column.always]
        column.paused = [(s, series if s is state else known) for s, known in column.paused]
        return series

    def _take_turns(self, column: Column, top: int, marks: _Marks, moments: Sequence[Moment]) -> None:
        """Judge a series by rules with ``every``. Until step ``column.due`` none of them has anything to do.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.

        :param top: the largest step in the column.
        """
        due, labels = NEVER, column.series[1]
        for state, _ in column.paused:
            every = state.rule.every
            if top // every > _bucket(state, labels):
                self._judge_column(state, column, marks, moments)
            due = min(due, (_bucket(state, labels) + 1) * every)
        column.due = due

    def _judge_column(self, state: RuleState, column: Column, marks: _Marks, moments: Sequence[Moment]) -> None:
        """Judge a series by one rule, whatever its guards say."""
        try:
            if state.changes:
                self._in_pieces(state, column, marks, moments)
            else:
                self._judge_part(state, column, 0, len(column.values), marks, moments)
        except Exception as error:
            self.failures.append(error)

    def _in_pieces(self, state: RuleState, column: Column, marks: _Marks, moments: Sequence[Moment]) -> None:
        """Judge a series by a rule of which a guard or a part changes in this block: cut where it does."""
        at = column.at
        for whose, said in state.starts:
            _say(whose, said)
        begin = 0
        for moment, whose, said in state.changes:
            end = bisect_left(at, moment)
            if end > begin:
                self._judge_part(state, column, begin, end, marks, moments)
                begin = end
            _say(whose, said)
        if begin < len(at):
            self._judge_part(state, column, begin, len(at), marks, moments)

    def _judge_part(
        self, state: RuleState, column: Column, begin: int, end: int, marks: _Marks, moments: Sequence[Moment]
    ) -> None:
        """Judge a part of a column by one rule."""
        if state.shut:
            every = state.rule.every
            bucket = _bucket(state, column.series[1]) if every > 1 else -NEVER
            state.held += sum([step // every > bucket for step in column.steps[begin:end]])
            return
        series = state.series.get(column.series[1]) or self._met(state, column)
        if series is None:
            return
        places: Sequence[int] = range(begin, end)
        if series.every > 1:
            bucket, every, steps, turns = series.bucket, series.every, column.steps, []
            for place in places:
                if steps[place] // every > bucket:  # one of each bucket, and none that comes late
                    bucket = steps[place] // every
                    turns.append(place)
            if not turns:
                return
            places, series.bucket = turns, bucket
        at = column.at
        changes = series.run(
            [column.values[place] for place in places],
            [column.steps[place] for place in places],
            [moments[at[place]][2] for place in places],
        )
        if changes:
            self._mark(state, column, places, changes, marks, moments)

    def _mark(
        self,
        state: RuleState,
        column: Column,
        places: Sequence[int] | None,
        changes: Sequence[Mark],
        marks: _Marks,
        moments: Sequence[Moment],
    ) -> None:
        """Keep what a run did, with the evaluation and the place in it to which each change belongs."""
        at, order = column.at, self._place[state.rule.id]
        for mark in changes:
            if mark.result == CHANGED and not self.watch_transitions:
                continue
            place = mark.place if places is None else places[mark.place]
            where, sample = column.sample(moments, place)
            marks.append((at[place], order, where, mark, sample))

    def _judge_groups(self, columns: Sequence[Column], marks: _Marks, moments: Sequence[Moment]) -> None:
        """``outlier`` compares what came together: evaluation by evaluation."""
        for state in self._grouped:
            metric = state.rule.selector.metric
            groups: dict[int, list[tuple[int, Sample]]] = {}
            for column in columns:
                if column.series[0] == metric:
                    for place, at in enumerate(column.at):
                        groups.setdefault(at, []).append(column.sample(moments, place))
            order = self._place[state.rule.id]
            for at in sorted(groups):
                group = [sample for _, sample in sorted(groups[at], key=lambda entry: entry[0])]
                for nth, (sample, mark) in enumerate(state.judge_siblings(group, moments[at].now)):
                    marks.append((at, order, nth, mark, sample))

    def _judge_absence(
        self, arrivals: Sequence[tuple[RuleState, Column]], marks: _Marks, moments: Sequence[Moment]
    ) -> None:
        """What came of metrics whose absence is watched; and ``missing``, which counts evaluations without them."""
        came: dict[str, list[tuple[int, int, Column, int]]] = {}
        for state, column in arrivals:
            entries = came.setdefault(state.rule.id, [])
            # The place among the samples of a moment only matters where a rule watches several series.
            several = len(entries) > 0
            entries += [(at, place, column, place) for place, at in enumerate(column.at)]
            if several:
                entries[:] = [(at, c.sample(moments, p)[0], c, p) for at, _, c, p in entries]
        looks = []
        for at, moment in enumerate(moments):
            if moment[3] is not None:
                looks.append(at)
        for state in self._absent_seconds if not self._absent_steps else [*self._absent_steps, *self._absent_seconds]:
            arrived = came.get(state.rule.id)
            counts = state.rule.condition.absence == "steps"
            if not (arrived or counts or looks):
                continue
            entries = sorted(arrived or (), key=lambda entry: entry[:2])
            order, nth = self._place[state.rule.id], 0
            for at in range(len(moments)) if counts else sorted({*looks, *[entry[0] for entry in entries]}):
                step, _, now, silent = moments[at]
                while nth < len(entries) and entries[nth][0] == at:
                    _, _, column, place = entries[nth]
                    mark = state.present(column.series[1], column.steps[place], now)
                    if mark is not None:
                        where, sample = column.sample(moments, place)
                        marks.append((at, order, where, mark, sample))
                    nth += 1
                # Steps are counted at evaluations, seconds where somebody looks.
                if (silent is None) is counts and not (self.recorded and self._never_had(state)):
                    for mark in state.judge_absence(silent, step, now):
                        marks.append((at, order, NEVER, mark, None))

    def tick(self, silent_seconds: float, now: float) -> Evaluation:
        """Judge ``stale`` rules: nothing has happened for ``silent_seconds``. For the watchdog."""
        found = self.judge((Moment(self.step, (), now, silent_seconds),))
        return found[0] if found else NOTHING

    @property
    def needs_watchdog(self) -> bool:
        return bool(self._absent_seconds)

    def _never_had(self, state: RuleState) -> bool:
        """Whether a record cannot tell if this metric was absent: it never had it, and was not asked to."""
        return not state.samples and state.rule.selector.key not in self.known

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step (a resume inside a record): counters of steps start there again.

        Windows and open episodes stay: what was seen before the restart was real.
        """
        for state in self.states:
            state.rewind(step)
        self._forget()
        self.step = step

    def _forget(self) -> None:
        self._shapes.forget()
        self.restarts += 1

    # -- alerts -----------------------------------------------------------------------

    def _conclude_all(self, marks: _Marks, moments: Sequence[Moment]) -> list[Evaluation]:
        """Evaluation by evaluation, and there in file order: what the marks of a block mean."""
        marks.sort(key=_where)
        results = []
        for at, group in groupby(marks, key=_moment):
            step, _, now, _ = moments[at]
            transitions, touched = [], []
            for _, order, _, mark, sample in group:
                state = self.states[order]
                if self.watch_transitions and mark.result != AGAIN:
                    stood = mark.last_step, mark.before, mark.after, mark.value, mark.score
                    transitions.append(Transition(state.rule.id, mark.name, *stood))
                if mark.result != CHANGED:
                    state.note(mark, sample)
                    touched.append(state)
            if touched or transitions:
                results.append(self._conclude(touched, step, now, transitions, at))
        return results

    def _conclude(
        self, touched: Iterable[RuleState], step: int, now: float, transitions: list[Transition], at: int
    ) -> Evaluation:
        """One evaluation, the one with the place ``at`` in its block.

        :param touched: rules with something to tell, in file order.
        """
        result = Evaluation(step, transitions=transitions)
        acting: list[tuple[RuleState, Alert]] = []
        for state in dict.fromkeys(touched):
            # Cleared before fired: a rule of which one series clears while another fires goes on.
            for series in state.cleared:
                state.firing.discard(series.labels)
            if state.fresh:
                alert = state.raise_alert(len(self.alerts) + 1, step, now, self.rank)
                self._cap(state.rule, alert, at)
                self.alerts.append(alert)
                state.episodes.append(alert)
                state.open = alert
                state.firing.update(s.labels for s in state.fresh)
                result.alerts.append(alert)
                acting.append((state, alert))
            elif state.again and self._due_again(state, step):
                alert = state.raise_alert(state.open.number if state.open else 0, step, now, self.rank, repeat=True)
                self._cap(state.rule, alert, at)
                acting.append((state, alert))
                result.alerts.append(alert)
            if state.cleared and not state.firing and state.open is not None:
                state.open.cleared_step = max(s.last_step for s in state.cleared)
                result.cleared.append(state.open)
                state.open = None
            state.reset_marks()
        # All alerts of the evaluation are known now: one may explain another that stands before it in the file.
        explain(acting, self.states)
        for state, alert in acting:
            mute(alert, self.mutes, self.mute_hits)
            alert.message = message(state.rule, alert)
        result.plan = plan_actions(acting, step)
        return result

    def _cap(self, rule: Rule, alert: Alert, at: int) -> None:
        if self.recorded and rule.only_if:
            cap(rule, alert, self.lookups.known_at(at), self.known)

    def _due_again(self, state: RuleState, step: int) -> bool:
        cooldown = state.rule.cooldown
        return cooldown is not None and state.last_action_step is not None and step - state.last_action_step >= cooldown

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. Save it after the step that a checkpoint covers was evaluated."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "rules": {state.rule.id: state.save(self.now) for state in self.states},
            **self.lookups.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, now: float = 0.0) -> list[str]:
        """Restore before the first evaluation; returns one sentence for every rule that starts fresh.

        A rule that is new, whose metric or condition changed, or whose saved state cannot be read starts
        fresh, its warm-up with it; the others go on.

        :param now: the clock of this run at this moment: ``for: 30s`` and the like go on from there.

        Raises ``StateError`` for a state of another format version.
        """
        if saved.get("version") != STATE_VERSION:
            raise StateError(f"saved detector state has version {saved.get('version')!r}, this is {STATE_VERSION}")
        step, entries, reasons = int(saved["step"]), saved["rules"], []
        for state in self.states:
            entry = entries.get(state.rule.id)
            why = f"{state.rule.id} is new" if entry is None else _restore_or_why(state, entry, now)
            if why:
                state.start_fresh(step)
                reasons.append(why)
        reasons += self.lookups.load_state_dict(saved)
        self.step, self.now = step, now
        self._forget()
        return reasons


_Marks = list[tuple[int, int, int, Mark, "Sample | None"]]
"""Changes of a block: evaluation, place of the rule in its file, place of the sample; the change, and its sample."""


def _where(entry: tuple[int, int, int, Mark, Sample | None]) -> tuple[int, int, int]:
    return entry[:3]


def _moment(entry: tuple[int, int, int, Mark, Sample | None]) -> int:
    return entry[0]


def _bucket(state: RuleState, labels: Labels) -> int:
    """The bucket of ``every`` in which a rule has judged a series last."""
    series = state.series.get(labels)
    return state.start_step // state.rule.every if series is None else series.bucket


def _say(whose: RuleState | Side, said: bool | None) -> None:
    """What a guard or a part says from here on."""
    if isinstance(whose, Side):
        whose.breach = said
    else:
        whose.shut = bool(said)


def _restore_or_why(state: RuleState, entry: Any, now: float) -> str:
    """Restore one rule; why it must start fresh instead, or empty."""
    try:
        if entry["fingerprint"] != state.rule.fingerprint:
            return f"{state.rule.id} starts fresh: its metric or condition changed"
        state.restore(entry, now)
    except Exception as error:  # whatever another version of a condition, or somebody's plugin, makes of it
        return f"{state.rule.id} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
    return ""
