"""The engine: blocks of evaluations, judged in a fixed order, and what they bring: transitions, alerts, actions to run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from healthcheck.core.alerts import Transition
from healthcheck.core.errors import StateError
from healthcheck.core.samples import BETWEEN, NO_LABELS, Labels, Row, Sample
from healthcheck.engine.columns import Moment
from healthcheck.engine.episodes import NOTHING, Episodes, Evaluation, RuleState
from healthcheck.engine.judging import BlockJudge, Marked
from healthcheck.engine.lookups import Inputs
from healthcheck.engine.rulestate import CauseState
from healthcheck.engine.series import AGAIN, CHANGED, WORSE
from healthcheck.extend.guard import describe
from healthcheck.rulelang.rule import Cause, Mute, RuleSet, owners

# --------------------------------------------------------------------------------------------------
# The engine: several evaluations at a time, each as if it had been judged alone.
#
# 1. sort the samples into series, 2. look at guards and other metrics and compute derived metrics, 3. judge **all** causes,
# series by series, 4. evaluation by evaluation and there in file order: put what they found into the episodes of their
# rules, hand out alerts and the action plan. Nothing here knows torch, a file or the time of day: steps and clocks come in as arguments.


_WHERE = itemgetter(0, 1, 2)
"""In which order the changes of a block are handed out: by evaluation, and there by rule and sample."""
_EVALUATION = itemgetter(0)
STATE_VERSION = 4
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
    :param going_on: by id: causes of an engine that this one takes the place of. They go on as they are.
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
        going_on: Mapping[str, CauseState] | None = None,
    ) -> None:
        self.rank = rank
        self.recorded = recorded
        self.known = frozenset(known)
        self.mutes: list[Mute] = list(rules.mutes)
        self.step = start_step
        self.now = 0.0
        """The clock at the last evaluation, in seconds of active training."""
        self._owner = owners(rules.causes, rules.derived)
        states = []
        for cause in filter(self._mine, rules.causes):
            excused = cause.id in self._owner
            known_state = (going_on or {}).get(cause.id)
            if known_state is None or known_state.excused != excused or not _alike(known_state.cause, cause):
                known_state = CauseState(cause, start_step, excused=excused, every_score=every_score)
            known_state.cause = cause
            states.append(known_state)
        self.states = states
        """All causes of all rules, in file order."""
        self.by_id = {state.cause.id: state for state in states}
        mine = [(rule, [self.by_id[c.id] for c in rule.causes if c.id in self.by_id]) for rule in rules.rules]
        self.episodes = Episodes([RuleState(rule, causes) for rule, causes in mine if causes], self.mutes, rank)
        self.rules = self.episodes.rules
        """The rules that are judged here, with their episodes, in file order."""
        self.alerts = self.episodes.alerts
        self.mute_hits = self.episodes.mute_hits
        self._judge = BlockJudge(
            states,
            rules.derived,
            recorded=recorded,
            known=self.known,
            watch_transitions=watch_transitions,
            met=self._met,
        )
        self.lookups = self._judge.lookups
        self.failures = self._judge.failures
        """What conditions have raised; whoever calls :meth:`judge` takes them from here, after what it returned."""
        self._awaited: list[Inputs] | None = None
        """Formulas that have not given a value yet, by whose first one a rule may apply; None: to be looked up."""
        self.restarts = 0
        """How often states were restored or rewound: what somebody has worked out from them holds no longer then."""

    @property
    def watch_transitions(self) -> bool:
        """Whether every change of state is collected, not only alerts."""
        return self._judge.watch_transitions

    @watch_transitions.setter
    def watch_transitions(self, watch: bool) -> None:
        self._judge.watch_transitions = watch

    def _mine(self, cause: Cause) -> bool:
        return cause.ranks != "zero" or self.rank == 0

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
        if len(moments) > 1 and self.episodes.undecided:
            cuts = self._cuts(moments)
            if cuts:
                parts = [moments[begin:end] for begin, end in pairwise([0, *cuts, len(moments)]) if begin < end]
                return [result for part in parts for result in self.judge(part)]
        for place, moment in enumerate(moments):
            given = moment[1]
            if type(given) is not Row and given and given[0].phase == BETWEEN:
                return self._judge_between(moments, place)
        self.step, _, self.now, _ = moments[-1]
        marks = self._judge.marks(moments)
        if not marks:
            if self.episodes.late:
                return (self._conclude((), moments[-1].step, self.now, [], len(moments) - 1),)
            return ()  # nearly always
        return self._conclude_all(marks, moments)

    def _cuts(self, moments: Sequence[Moment]) -> Sequence[int]:
        """Where to cut a block because a series first comes by which a rule may apply: it judges what follows otherwise."""
        concerns = self.episodes.concerns
        if self._awaited is None:
            self._awaited = [inputs for inputs in self.lookups.formulas if concerns(inputs.formula.name, NO_LABELS)]
        if self._awaited:
            self._awaited = [inputs for inputs in self._awaited if not inputs.series]
            for inputs in self._awaited:
                if inputs.level > 1 or all(name in self.lookups.last for name in inputs.formula.triggers):
                    return range(1, len(moments))  # it comes as soon as its windows are full
        place = self._judge.first_new(moments, self._may_apply)
        return (place, place + 1) if place >= 0 else ()

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
            series = state.series.get(sample.labels) if state.cause.selector.metric == sample.metric else None
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
    def first_budget(self) -> float:
        return self._judge.first_budget

    @property
    def counts_steps(self) -> bool:
        """Whether an evaluation without any sample means something to a rule (``missing``)."""
        return self._judge.counts_steps

    @contextlib.contextmanager
    def muted(self, mute: Mute) -> Iterator[None]:
        """Inside this block the mute counts; it ends with the step at hand."""
        self.mutes.append(mute)
        try:
            yield
        finally:
            self.mutes[self.mutes.index(mute)] = replace(mute, last=self.step)

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

    def begin_again(self, step: int, start_step: int) -> None:
        """Another run begins inside of a record, at ``step``: nothing is known of it, and no episode goes on into it.

        What was judged before counts for the verdicts. Derived metrics are the caller's, as are their windows.
        """
        for state in self.states:
            state.begin_again(start_step)
        for rule in self.rules.values():
            rule.begin_again(self.step)
        self.lookups.load_state_dict({"derived": {}, "last": {}})
        self._forget()
        self.step = step

    def _met(self, metric: str, labels: Labels) -> None:
        """A series comes for the first time."""
        if self.episodes.undecided and self.episodes.saw(metric, labels, self.step):
            self.restarts += 1

    def _may_apply(self, metric: str, labels: Labels) -> bool:
        """Whether some rule may apply once this series has come, or what is derived from it."""
        return bool(self._awaited) or self.episodes.concerns(metric, labels)

    def _forget(self) -> None:
        self._judge.forget()
        self.episodes.forget()
        self._awaited = None
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
                if self.watch_transitions and mark.result not in (AGAIN, WORSE):
                    stood = mark.last_step, mark.before, mark.after, mark.value, mark.score
                    transitions.append(Transition(state.cause.rule, mark.name, *stood, state.cause.name))
                if mark.result != CHANGED:
                    state.note(mark, sample)
                    touched.append(state)
            if touched or transitions:
                results.append(self._conclude(touched, step, now, transitions, at))
        return results

    def _conclude(
        self, touched: Iterable[CauseState], step: int, now: float, transitions: list[Transition], at: int
    ) -> Evaluation:
        """One evaluation, the one with the place ``at`` in its block.

        :param touched: causes with something to tell, in file order.
        """
        result = Evaluation(step, transitions=transitions)

        def unknown(metric: str) -> bool:
            """Whether a record does not say what a guard asks for."""
            return self.recorded and metric not in self.known and metric not in self.lookups.known_at(at)

        self.episodes.conclude(result, dict.fromkeys(touched), step, now, unknown)
        return result

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values. Save it after the step that a checkpoint covers was evaluated."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "causes": {state.cause.id: state.save(self.now) for state in self.states},
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
            entry = entries.get(state.cause.id)
            why = f"{state.cause.id} is new" if entry is None else _restore_or_why(state, entry, now)
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


def _alike(one: Cause, other: Cause) -> bool:
    """Whether a cause that was compiled twice says the same."""
    shown: dict[str, Any] = {
        "condition": one.condition,
        "message": one.message,
        "origin": one.origin,
        "key_origins": one.key_origins,
    }
    return one.fingerprint == other.fingerprint and replace(other, **shown) == one


def _restore_or_why(state: CauseState, entry: Any, now: float) -> str:
    """Restore one rule; why it must start fresh instead, or empty."""
    try:
        if entry["fingerprint"] != state.cause.fingerprint:
            return f"{state.cause.id} starts fresh: its metric or condition changed"
        state.restore(entry, now)
    except Exception as error:  # whatever another version of a condition, or somebody's plugin, makes of it
        return f"{state.cause.id} starts fresh: its saved state cannot be read ({describe(error)})"
    return ""
