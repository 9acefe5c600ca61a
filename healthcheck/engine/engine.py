"""The engine: one evaluation at a time, in a fixed order.

1. take the samples of this event, 2. compute derived metrics, 3. judge **all** rules in file order,
4. apply ``explains`` and mutes, 5. hand out alerts and the action plan. Nothing here knows torch, a
file or the time of day: the step and the clock come in as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.engine.alerts import cap, explain, message, mute
from healthcheck.engine.evaluation import NOTHING, Evaluation
from healthcheck.engine.lookups import Lookups
from healthcheck.engine.planning import plan_actions
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState
from healthcheck.errors import StateError
from healthcheck.rulelang.ownership import owners
from healthcheck.rulelang.rule import Mute, Rule, RuleSet
from healthcheck.samples import Labels, Sample
from healthcheck.verdicts import Alert, Transition

STATE_VERSION = 1


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
    ) -> None:
        self.rank = rank
        self.recorded = recorded
        self.known = frozenset(known)
        self.watch_transitions = watch_transitions
        self.mutes: list[Mute] = list(rules.mutes)
        self.mute_hits: dict[int, int] = {}
        self.alerts: list[Alert] = []
        self.step = start_step
        self._owner = owners(rules.rules, rules.derived)
        self.states = [RuleState(r, start_step, excused=r.id in self._owner) for r in rules.rules if self._mine(r)]
        self.by_id = {state.rule.id: state for state in self.states}
        self._order = {id(state): i for i, state in enumerate(self.states)}
        self._by_metric: dict[str, list[RuleState]] = {}
        self._routes: dict[tuple[str, Labels, str], list[tuple[RuleState, SeriesState | None]]] = {}
        self._sides: dict[str, list[RuleState]] = {}
        self._absent_steps: list[RuleState] = []
        self._absent_seconds: list[RuleState] = []
        self._grouped = [state for state in self.states if state.across]
        for state in self.states:
            self._index(state)
        self.lookups = Lookups((state.rule for state in self.states), rules.derived)

    def _mine(self, rule: Rule) -> bool:
        return rule.ranks != "zero" or self.rank == 0

    def _index(self, state: RuleState) -> None:
        absence = state.rule.condition.absence
        if absence == "seconds":
            self._absent_seconds.append(state)
        elif absence == "steps":
            self._absent_steps.append(state)
        self._by_metric.setdefault(state.rule.selector.metric, []).append(state)
        for side in state.sides:
            self._sides.setdefault(side.selector.metric, []).append(state)

    # -- evaluating -------------------------------------------------------------------

    def evaluate(self, step: int, samples: Sequence[Sample], now: float) -> Evaluation:
        """Judge the samples of one event.

        :param step: the step during which this happens; samples may belong to an earlier one.
        :param samples: numbers on the host, any order.
        :param now: seconds of active training (see rule-language 4.5), non-decreasing.
        """
        self.step = step
        if self.lookups.tracked:
            samples = self.lookups.extend(samples)
        transitions: list[Transition] | None = [] if self.watch_transitions else None
        touched: list[RuleState] = []
        routes = self._routes
        if self._sides:
            for sample in samples:
                self._feed_sides(sample)
        for sample in samples:
            key = (sample.metric, sample.labels, sample.phase)
            route = routes.get(key)
            if route is None:
                route = self._route(*key)
            value, at = sample.value, sample.step
            for state, series in route:
                if series is None:
                    if not self._admit(state, sample, now, transitions, touched):
                        continue
                    series = state.state_of(sample.labels)
                    if series is None:
                        continue
                result = series.feed(value, at, now)
                if result:
                    state.mark(result, series, sample, transitions)
                    if state.touched:
                        touched.append(state)
        if self._grouped:
            self._judge_groups(samples, now, transitions, touched)
        for state in self._absent_steps:
            if self.recorded and self._never_had(state):
                continue
            state.judge_absence(None, step, now, transitions)
            if state.touched:
                touched.append(state)
        if not touched and not transitions:
            return NOTHING
        return self._conclude(touched, step, now, transitions or [])

    def _route(self, metric: str, labels: Labels, phase: str) -> list[tuple[RuleState, SeriesState | None]]:
        """Who judges samples of one series, in file order; looked up once per series.

        ``None`` for the series: the rule must look at each sample first (guards, absence, siblings).
        """
        route: list[tuple[RuleState, SeriesState | None]] = []
        for state in self._by_metric.get(metric, ()):
            if state.phase not in ("any", phase):
                continue
            if state.special:
                route.append((state, None))
                continue
            series = state.state_of(labels)
            if series is not None:
                route.append((state, series))
        self._routes[metric, labels, phase] = route
        return route

    def _admit(
        self,
        state: RuleState,
        sample: Sample,
        now: float,
        transitions: list[Transition] | None,
        touched: list[RuleState],
    ) -> bool:
        """Whether a rule that is not plain takes this sample the plain way."""
        if state.across:
            return False
        if state.rule.condition.absence:
            state.present(sample, now, transitions)
            if state.touched:
                touched.append(state)
            return False
        if state.rule.only_if and not self.lookups.holds(state.rule):
            state.held += 1
            return False
        return True

    def tick(self, silent_seconds: float, now: float) -> Evaluation:
        """Judge ``stale`` rules: nothing has happened for ``silent_seconds``. For the watchdog."""
        touched = []
        transitions: list[Transition] | None = [] if self.watch_transitions else None
        for state in self._absent_seconds:
            if self.recorded and self._never_had(state):
                continue
            state.judge_absence(silent_seconds, self.step, now, transitions)
            if state.touched:
                touched.append(state)
        return self._conclude(touched, self.step, now, transitions or []) if touched else NOTHING

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
        self.step = step

    def _feed_sides(self, sample: Sample) -> None:
        for state in self._sides.get(sample.metric, ()):
            for side in state.sides:
                if side.selector.metric == sample.metric:
                    side.feed(sample)

    def _judge_groups(
        self, samples: Sequence[Sample], now: float, transitions: list[Transition] | None, touched: list[RuleState]
    ) -> None:
        for state in self._grouped:
            group = [s for s in samples if s.metric == state.rule.selector.metric]
            if group:
                state.judge_siblings(group, now, transitions)
                if state.touched:
                    touched.append(state)

    # -- alerts -----------------------------------------------------------------------

    def _conclude(
        self, touched: Iterable[RuleState], step: int, now: float, transitions: list[Transition]
    ) -> Evaluation:
        result = Evaluation(transitions=transitions)
        acting: list[tuple[RuleState, Alert]] = []
        for state in sorted(dict.fromkeys(touched), key=lambda s: self._order[id(s)]):
            for series in state.cleared:
                state.firing.discard(series.labels)
            if state.fresh:
                alert = state.raise_alert(len(self.alerts) + 1, step, now, self.rank)
                self._cap(state.rule, alert)
                self.alerts.append(alert)
                state.episodes.append(alert)
                state.open = alert
                state.firing.update(s.labels for s in state.fresh)
                result.alerts.append(alert)
                acting.append((state, alert))
            elif state.again and self._due_again(state, step):
                alert = state.raise_alert(state.open.number if state.open else 0, step, now, self.rank, repeat=True)
                self._cap(state.rule, alert)
                acting.append((state, alert))
                result.alerts.append(alert)
            if state.cleared and not state.firing and state.open is not None:
                state.open.cleared_step = max(s.last_step for s in state.cleared)
                result.cleared.append(state.open)
                state.open = None
            state.reset_marks()
        explain(acting, self.states)
        for state, alert in acting:
            mute(alert, self.mutes, self.mute_hits)
            alert.message = message(state.rule, alert)
        result.plan = plan_actions(acting, step)
        return result

    def _cap(self, rule: Rule, alert: Alert) -> None:
        if self.recorded and rule.only_if:
            cap(rule, alert, self.lookups.last, self.known)

    def _due_again(self, state: RuleState, step: int) -> bool:
        cooldown = state.rule.cooldown
        return cooldown is not None and state.last_action_step is not None and step - state.last_action_step >= cooldown

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. Save it after the step that a checkpoint covers was evaluated."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "rules": {state.rule.id: state.state_dict() for state in self.states},
            **self.lookups.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore; returns one sentence for every rule that starts fresh.

        Raises ``StateError`` for a state of another format version.
        """
        if saved.get("version") != STATE_VERSION:
            raise StateError(f"saved detector state has version {saved.get('version')!r}, this is {STATE_VERSION}")
        fresh = []
        for state in self.states:
            entry = saved["rules"].get(state.rule.id)
            if entry is None:
                fresh.append(f"{state.rule.id} is new")
            elif entry["fingerprint"] != state.rule.fingerprint:
                fresh.append(f"{state.rule.id} starts fresh: its metric or condition changed")
            else:
                state.load_state_dict(entry)
        self.lookups.load_state_dict(saved)
        self.step = saved["step"]
        return fresh
