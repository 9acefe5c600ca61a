"""The engine: evaluations in, several at a time, and what they bring: transitions, alerts, and actions to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from healthcheck.core.alerts import Alert, Severity, Transition
from healthcheck.core.errors import StateError
from healthcheck.core.samples import BETWEEN, Row, Sample
from healthcheck.engine.columns import Moment
from healthcheck.engine.judging import BlockJudge, Marked
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import AGAIN, CHANGED
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


_WHERE = itemgetter(0, 1, 2)
"""In which order the changes of a block are given: by evaluation, and there by rule and sample."""
_EVALUATION = itemgetter(0)
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
        self._judge = BlockJudge(
            states, rules.derived, recorded=recorded, known=self.known, watch_transitions=watch_transitions
        )
        self.lookups = self._judge.lookups
        self.failures = self._judge.failures
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
        marks = self._judge.marks(moments)
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
        for state in self.states:
            series = state.series.get(sample.labels) if state.rule.selector.metric == sample.metric else None
            if series is None or state.shut or state.phase not in ("any", "train"):
                continue
            bound = series.bound(sample.step)
            if bound is not None and not bound.low <= sample.value <= bound.high:
                return True
        return False

    def tick(self, silent_seconds: float, now: float) -> Evaluation:
        """Judge ``stale`` rules: nothing has happened for ``silent_seconds``. For the watchdog."""
        found = self.judge((Moment(self.step, (), now, silent_seconds),))
        return found[0] if found else NOTHING

    @property
    def needs_watchdog(self) -> bool:
        return self._judge.needs_watchdog

    @property
    def counts_steps(self) -> bool:
        """Whether an evaluation without any sample means something to a rule (``missing``)."""
        return self._judge.counts_steps

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step (a resume inside a record): counters of steps start there again.

        Windows and open episodes stay: what was seen before the restart was real.
        """
        for state in self.states:
            state.rewind(step)
        self._forget()
        self.step = step

    def _forget(self) -> None:
        self._judge.forget()
        self.restarts += 1

    # -- alerts -----------------------------------------------------------------------

    def _conclude_all(self, marks: list[Marked], moments: Sequence[Moment]) -> list[Evaluation]:
        """Evaluation by evaluation, and there in file order: what the marks of a block mean."""
        marks.sort(key=_WHERE)
        results = []
        for at, group in groupby(marks, key=_EVALUATION):
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


def _restore_or_why(state: RuleState, entry: Any, now: float) -> str:
    """Restore one rule; why it must start fresh instead, or empty."""
    try:
        if entry["fingerprint"] != state.rule.fingerprint:
            return f"{state.rule.id} starts fresh: its metric or condition changed"
        state.restore(entry, now)
    except Exception as error:  # whatever another version of a condition, or somebody's plugin, makes of it
        return f"{state.rule.id} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
    return ""
