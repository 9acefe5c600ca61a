"""The engine: one evaluation at a time, in a fixed order, and what it brings: transitions, alerts, and actions to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.core.alerts import Transition
from healthcheck.core.errors import StateError
from healthcheck.core.samples import Labels, Sample
from healthcheck.engine.episodes import NOTHING, Episodes, Evaluation, RuleState
from healthcheck.engine.routes import SERIES, Lookups, Plans
from healthcheck.engine.rulestate import CauseState
from healthcheck.rulelang.rule import Cause, Mute, RuleSet, owners

# --------------------------------------------------------------------------------------------------
# The engine: one evaluation at a time, in a fixed order.
#
# 1. take the samples of this event, 2. compute derived metrics, 3. judge **all** causes in file order,
# 4. put what they found into the episodes of their rules, 5. apply mutes and what holds alerts back, 6. hand out alerts
# and the action plan. Nothing here knows torch, a
# file or the time of day: the step and the clock come in as arguments.


STATE_VERSION = 4
"""Of :meth:`Engine.state_dict`."""


def step_by_step(samples: Sequence[Sample]) -> Sequence[Sequence[Sample]]:
    """Values of several steps may arrive at once; a guard or a formula must see those of its own step.

    Live runs and replays of their records cut an evaluation up in this way, so that both judge alike.
    """
    begin, step, parts = 0, samples[0].step if samples else 0, []
    for index, sample in enumerate(samples):
        if sample.step != step:
            parts.append(samples[begin:index])
            begin, step = index, sample.step
    parts.append(samples[begin:] if begin else samples)
    return parts


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
        self.step = start_step
        self.now = 0.0
        """The clock at the last evaluation, in seconds of active training."""
        self._owner = owners(rules.causes, rules.derived)
        states = [
            CauseState(cause, start_step, excused=cause.id in self._owner, every_score=every_score)
            for cause in rules.causes
            if self._mine(cause)
        ]
        self.states = states
        """All causes of all rules, in file order."""
        self.by_id = {state.rule.id: state for state in states}
        mine = [(rule, [self.by_id[c.id] for c in rule.causes if c.id in self.by_id]) for rule in rules.rules]
        self.episodes = Episodes([RuleState(rule, causes) for rule, causes in mine if causes], self.mutes, rank)
        self.rules = self.episodes.rules
        """The rules that are judged here, with their episodes, in file order."""
        self.alerts = self.episodes.alerts
        self.mute_hits = self.episodes.mute_hits
        self._place = {state.rule.id: i for i, state in enumerate(states)}
        # Absence is judged by the clock and siblings by what came together: both stand outside the routes of samples.
        self._absent_steps = [state for state in states if state.rule.condition.absence == "steps"]
        self._absent_seconds = [state for state in states if state.rule.condition.absence == "seconds"]
        self._grouped = [state for state in states if state.across]
        self.lookups = Lookups(states, rules.derived)
        self._plans = Plans(states, self.lookups)
        if self.episodes.undecided:
            self._plans.met = self._saw
        self.restarts = 0
        """How often states were restored or rewound: what somebody has worked out from them holds no longer then."""

    def _mine(self, cause: Cause) -> bool:
        return cause.ranks != "zero" or self.rank == 0

    # -- evaluating -------------------------------------------------------------------

    def evaluate(self, step: int, samples: Sequence[Sample], now: float) -> Evaluation:
        """Judge the samples of one event.

        :param step: the step during which this happens; samples may belong to an earlier one.
        :param samples: numbers on the host, any order.
        :param now: seconds of active training (see rule-language 4.5), non-decreasing.
        """
        self.step = step
        self.now = now
        transitions: list[Transition] | None = [] if self.watch_transitions else None
        touched: list[CauseState] = []
        plans = self._plans
        # Mostly the same series come together as the last time: to compare is cheaper than to build and hash a key.
        plan = plans.latest.get(len(samples))
        if plan is not None:
            shape, at = plan.shape, 0
            for sample in samples:
                if (sample.metric, sample.labels, sample.phase) != shape[at]:
                    plan = None
                    break
                at += 1  # noqa: SIM113 - for the usual one sample half as dear as `enumerate`
        if plan is None:
            plan = plans.latest[len(samples)] = plans[tuple(map(SERIES, samples))]
        part = samples
        parts = [(plan, part)]
        # Guards and other metrics are looked at before any rule is judged: a rule sees them as of its own step,
        # wherever in the file it stands.
        while plan.watched is not None and (part := self.lookups.take(part, plan.watched)):
            following = plan.following
            if following is None or len(part) != len(plan.watched.derivations):
                following = plans.after(plan, part)
            plan = following
            parts.append((plan, part))  # derived metrics may build on each other
        for plan, part in parts:
            # Rules that pause (`every`) are asked only at steps at which one of them may be due.
            for index, judges in plan.always if step < plan.due else plan.with_due(part):
                sample = part[index]
                value, at = sample.value, sample.step
                run: tuple[float, ...] | None = None
                for state, series in judges:
                    if state.shut:
                        state.held += 1
                        continue
                    if series is None:
                        self._look(state, sample, now, transitions)
                        if state.touched:
                            touched.append(state)
                        continue
                    # Most samples change nothing, and calls are what costs: those are noted here.
                    if series.idle_from <= value <= series.idle_to:
                        series.n += 1
                        series.last_step = at
                        series.value = value
                        continue
                    # The run of one sample is made once for all that judge it, and not at all if nobody needs it.
                    if run is None:
                        run, steps, scored = (value,), (at,), value - value == 0.0
                    if scored or series.nonfinite_ok:
                        found = series.update(run, steps, series.quiet)
                        if not found:
                            series.n += 1
                            series.last_step = at
                            series.value = value
                            continue
                        score, normal = found[0]
                        if score is None and series.n:  # the first one says that there is data
                            series.n += 1
                            series.last_step = at
                            series.value = value
                            series.score, series.normal = None, normal
                            continue
                    else:
                        score, normal = None, series.scorer.normal
                    result = series.judge(value, score, normal, at, now)
                    if result:
                        state.mark(result, series, sample, transitions)
                        if state.touched:
                            touched.append(state)
        if self._grouped and len(parts) > 1:
            samples = [sample for _, part in parts for sample in part]
        if self._grouped:
            self._judge_groups(samples, now, transitions, touched)
        for state in self._absent_steps:
            if self.recorded and self._never_had(state):
                continue
            state.judge_absence(None, step, now, transitions)
            if state.touched:
                touched.append(state)
        if not touched and not transitions and not self.episodes.late:
            return NOTHING  # one object for nearly all evaluations: callers compare with it
        return self._conclude(touched, step, now, transitions or [])

    def _look(self, state: CauseState, sample: Sample, now: float, transitions: list[Transition] | None) -> None:
        """A rule that watches absence hears of the sample; one whose guards hold for the first time gets its series."""
        if state.rule.condition.absence:
            state.present(sample, now, transitions)
            return
        self._plans.forget()  # plans hold None where this series is now
        state.judge(sample, sample.value, now, transitions)

    def tick(self, silent_seconds: float, now: float) -> Evaluation:
        """Judge ``stale`` rules: nothing has happened for ``silent_seconds``. For the watchdog."""
        self.now = now
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

    def _never_had(self, state: CauseState) -> bool:
        """Whether a record cannot tell if this metric was absent: it never had it, and was not asked to."""
        return not state.samples and state.rule.selector.key not in self.known

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step (a resume inside a record): counters of steps start there again.

        Windows and open episodes stay: what was seen before the restart was real.
        """
        for state in self.states:
            state.rewind(step)
        for rule in self.rules.values():
            rule.rewind(step)
        self._forget()
        self.step = step

    def _saw(self, metric: str, labels: Labels) -> None:
        if self.episodes.saw(metric, labels, self.step):
            self.restarts += 1

    def _forget(self) -> None:
        self._plans.forget()
        self.restarts += 1

    def _judge_groups(
        self, samples: Sequence[Sample], now: float, transitions: list[Transition] | None, touched: list[CauseState]
    ) -> None:
        for state in self._grouped:
            group = [s for s in samples if s.metric == state.rule.selector.metric]
            if group:
                state.judge_siblings(group, now, transitions)
                if state.touched:
                    touched.append(state)

    # -- alerts -----------------------------------------------------------------------

    def _conclude(
        self, touched: Iterable[CauseState], step: int, now: float, transitions: list[Transition]
    ) -> Evaluation:
        transitions.sort(key=lambda t: self._place[f"{t.rule}.{t.cause}" if t.cause else t.rule])
        result = Evaluation(step, transitions=transitions)
        in_order = sorted(dict.fromkeys(touched), key=lambda s: self._place[s.rule.id])
        self.episodes.conclude(result, in_order, step, now, self._unknown)
        return result

    def _unknown(self, metric: str) -> bool:
        """Whether a record does not say what a guard asks for."""
        return self.recorded and metric not in self.lookups.last and metric not in self.known

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. Save it after the step that a checkpoint covers was evaluated."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "causes": {state.rule.id: state.save(self.now) for state in self.states},
            "rules": {rule_id: rule.save() for rule_id, rule in self.rules.items()},
            **self.lookups.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, now: float = 0.0) -> list[str]:
        """Restore before the first evaluation; returns one sentence for every cause that starts fresh.

        A cause that is new, whose metric or condition changed, or whose saved state cannot be read starts
        fresh, its warm-up with it; the others go on.

        :param now: the clock of this run at this moment: ``for: 30s`` and the like go on from there.

        Raises ``StateError`` for a state of another format version.
        """
        if saved.get("version") != STATE_VERSION:
            raise StateError(f"saved detector state has version {saved.get('version')!r}, this is {STATE_VERSION}")
        step, entries, reasons = int(saved["step"]), saved["causes"], []
        for state in self.states:
            entry = entries.get(state.rule.id)
            why = f"{state.rule.id} is new" if entry is None else _restore_or_why(state, entry, now)
            if why:
                state.start_fresh(step)
                reasons.append(why)
        for rule_id, rule in self.rules.items():
            entry = saved["rules"].get(rule_id)
            try:
                if entry is not None:
                    rule.restore(entry)
            except Exception as error:  # as for causes: one that cannot be read must not take the others with it
                rule.start_fresh()
                reasons.append(f"{rule_id} forgets its episodes: they cannot be read ({type(error).__name__}: {error})")
        reasons += self.lookups.load_state_dict(saved)
        self.step, self.now = step, now
        self._forget()
        return reasons


def _restore_or_why(state: CauseState, entry: Any, now: float) -> str:
    """Restore one rule; why it must start fresh instead, or empty."""
    try:
        if entry["fingerprint"] != state.rule.fingerprint:
            return f"{state.rule.id} starts fresh: its metric or condition changed"
        state.restore(entry, now)
    except Exception as error:  # whatever another version of a condition, or somebody's plugin, makes of it
        return f"{state.rule.id} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
    return ""
