"""The engine: one evaluation at a time, in a fixed order.

1. take the samples of this event, 2. compute derived metrics, 3. judge **all** rules in file order,
4. apply ``explains`` and mutes, 5. hand out alerts and the action plan. Nothing here knows torch, a
file or the time of day: the step and the clock come in as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.engine.planning import PlannedAction, plan_actions
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState
from healthcheck.errors import StateError
from healthcheck.rulelang.ownership import owners
from healthcheck.rulelang.rule import Derived, Mute, Rule, RuleSet
from healthcheck.samples import NO_LABELS, Labels, Sample, decode_number, encode_number
from healthcheck.verdicts import Alert, Severity, Transition

STATE_VERSION = 1


@dataclass(slots=True)
class Evaluation:
    """What one evaluation brought. Empty most of the time."""

    alerts: list[Alert] = field(default_factory=list)
    """New episodes and repeats under ``cooldown``, in file order."""
    cleared: list[Alert] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    plan: list[PlannedAction] = field(default_factory=list)
    """Actions in the order in which they must run."""

    def __bool__(self) -> bool:
        return bool(self.alerts or self.cleared or self.transitions)


_NOTHING = Evaluation()


def step_by_step(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    """Values of several steps may arrive at once; a guard or a formula must see those of its own step.

    Live runs and replays of their records cut an evaluation up in this way, so that both judge alike.
    """
    begin = 0
    for index in range(1, len(samples)):
        if samples[index].step != samples[begin].step:
            yield samples[begin:index]
            begin = index
    yield samples[begin:] if begin else samples


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
        self.derived: list[Derived] = list(rules.derived)
        self._derived_inputs: dict[str, list[Derived]] = {}
        for derived in self.derived:
            for name in derived.inputs:
                self._derived_inputs.setdefault(name, []).append(derived)
        tracked = {g.metric for s in self.states for g in s.rule.only_if}
        self._tracked = tracked | set(self._derived_inputs)
        self.last: dict[str, tuple[int, float]] = {}
        """Last value of the metrics that guards and derived metrics look up: (step, value)."""

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
        if self._tracked:
            samples = self._derive(step, samples)
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
            return _NOTHING
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
        if state.rule.only_if and not self._guarded(state):
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
        return self._conclude(touched, self.step, now, transitions or []) if touched else _NOTHING

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

    def _guarded(self, state: RuleState) -> bool:
        """Whether all guards hold. A guard without samples counts as satisfied."""
        for guard in state.rule.only_if:
            seen = self.last.get(guard.metric)
            if seen is not None and not guard.test(seen[1]):
                return False
        return True

    def _derive(self, step: int, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Remember what guards and derived metrics look up; append what can be computed."""
        tracked = self._tracked
        for sample in samples:
            if sample.metric in tracked:
                break
        else:
            return samples
        extended = list(samples)
        ready: dict[int, tuple[Derived, Sample]] = {}
        for sample in extended:  # grows while we walk: derived metrics may build on each other
            if sample.metric not in self._tracked or sample.labels:
                continue
            self.last[sample.metric] = (sample.step, sample.value)
            for derived in self._derived_inputs.get(sample.metric, ()):
                derived.feed(sample.metric, sample.value)
                if sample.metric in derived.triggers:
                    ready[id(derived)] = (derived, sample)
        for derived, sample in ready.values():
            current = [self.last.get(name) for name in derived.triggers]
            if any(seen is None or seen[0] != sample.step for seen in current):
                continue
            value = derived.compute(lambda name: self.last[name][1] if name in self.last else None)
            if value is not None:
                made = Sample(derived.name, sample.step, value, NO_LABELS, sample.phase, sample.time)
                extended.append(made)
                if derived.name in self._tracked:
                    self.last[derived.name] = (made.step, value)
        return extended

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
                self._cap(state, alert)
                self.alerts.append(alert)
                state.episodes.append(alert)
                state.open = alert
                state.firing.update(s.labels for s in state.fresh)
                result.alerts.append(alert)
                acting.append((state, alert))
            elif state.again and self._due_again(state, step):
                alert = state.raise_alert(state.open.number if state.open else 0, step, now, self.rank, repeat=True)
                self._cap(state, alert)
                acting.append((state, alert))
                result.alerts.append(alert)
            if state.cleared and not state.firing and state.open is not None:
                state.open.cleared_step = max(s.last_step for s in state.cleared)
                result.cleared.append(state.open)
                state.open = None
            state.reset_marks()
        self._explain(acting)
        for state, alert in acting:
            self._mute(alert)
            alert.message = self._message(state.rule, alert)
        result.plan = plan_actions(acting, step)
        return result

    def _cap(self, state: RuleState, alert: Alert) -> None:
        if not self.recorded:
            return
        unsaid = [
            g.metric
            for g in state.rule.only_if
            if g.metric not in self.last and g.metric not in self.known and g.test.text != "absent"
        ]
        if unsaid:
            alert.severity = min(alert.severity, Severity.WARNING)
            alert.facts.setdefault("capped", "the record does not say " + ", ".join(unsaid))

    def _due_again(self, state: RuleState, step: int) -> bool:
        cooldown = state.rule.cooldown
        return cooldown is not None and state.last_action_step is not None and step - state.last_action_step >= cooldown

    def _explain(self, acting: list[tuple[RuleState, Alert]]) -> None:
        firing = {state.rule.id: state.rule for state in self.states if state.firing}
        for _, alert in acting:
            for other in firing.values():
                if alert.rule in other.explains:
                    alert.explained_by = other.id
                    break

    def _mute(self, alert: Alert) -> None:
        for index, mute in enumerate(self.mutes):
            if mute.covers(alert.rule, alert.fired_step):
                alert.muted = mute.reason
                self.mute_hits[index] = self.mute_hits.get(index, 0) + 1

    def _message(self, rule: Rule, alert: Alert) -> str:
        assert rule.message is not None, "the rule compiler gives every rule a message"
        fields: dict[str, Any] = {
            "value": alert.value,
            "score": alert.score,
            "normal": alert.normal,
            "threshold": alert.threshold,
            "window": getattr(rule.condition, "window", None),
            "step": alert.fired_step,
            "epoch": None,
            "rule": alert.rule,
            "series": alert.series[0].name if alert.series else rule.selector.metric,
            "rank": alert.rank,
            "count": alert.count,
        }
        return rule.message(fields)

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. Save it after the step that a checkpoint covers was evaluated."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "rules": {state.rule.id: state.state_dict() for state in self.states},
            "derived": {d.name: {"text": d.text, "state": d.state()} for d in self.derived},
            "last": {name: [step, encode_number(value)] for name, (step, value) in self.last.items()},
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
        for derived in self.derived:
            entry = saved["derived"].get(derived.name)
            if entry is not None and entry["text"] == derived.text:
                derived.restore(entry["state"])
        self.last = {name: (int(step), decode_number(value)) for name, (step, value) in saved["last"].items()}
        self.step = saved["step"]
        return fresh
