"""One rule at work: its series, its open alert, its closest approach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from healthcheck.engine.combined import CombinedScorer, Side
from healthcheck.engine.kinds import series_for
from healthcheck.engine.series import AGAIN, CHANGED, CLEARED, FIRED, SeriesState
from healthcheck.protocols import Scorer
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import NO_LABELS, Labels, Sample
from healthcheck.verdicts import Alert, SeriesFact, State, Transition

WORST = 5
"""How many series an alert names."""


class RuleState:
    """Everything the engine knows about one rule in one run."""

    __slots__ = (
        "across",
        "action_runs",
        "again",
        "cleared",
        "episodes",
        "excused",
        "fired_samples",
        "firing",
        "fresh",
        "held",
        "last_action_step",
        "open",
        "past_episodes",
        "phase",
        "rule",
        "series",
        "shut",
        "sides",
        "start_step",
        "touched",
    )

    def __init__(self, rule: Rule, start_step: int, *, excused: bool) -> None:
        self.rule = rule
        self.excused = excused
        """Another rule owns non-finite samples of this metric (rule-language 5.3)."""
        self.phase = rule.phase
        self.across: str = getattr(rule.condition, "across", "")
        self.shut = False
        """A guard of ``only_if`` does not hold just now."""
        self.start_fresh(start_step)

    def start_fresh(self, start_step: int) -> None:
        """Begin with nothing seen, after ``start_step``."""
        parts = getattr(self.rule.condition, "parts", ())
        self.start_step = start_step
        self.series: dict[Labels, SeriesState | None] = {}
        self.sides = [Side(selector, part) for selector, part in parts if selector]
        self.open: Alert | None = None
        self.firing: set[Labels] = set()
        self.episodes: list[Alert] = []
        self.past_episodes = 0
        """Episodes of the run that was resumed."""
        self.held = 0
        """Samples that ``only_if`` held back."""
        self.action_runs = 0
        self.last_action_step: int | None = None
        self.reset_marks()

    @property
    def samples(self) -> int:
        """Samples that were judged or left to the owner of non-finite values."""
        return sum(s.n + s.excused_count for s in self.series.values() if s is not None)

    @property
    def closest(self) -> tuple[float, int] | None:
        """Score and step of the closest approach."""
        judged = [s for s in self.series.values() if s is not None and s.peak != -math.inf]
        if not judged:
            return None
        best = max(judged, key=lambda s: s.peak)
        return (best.peak if best.upward else -best.peak), best.peak_step

    # -- judging ----------------------------------------------------------------------

    def state_of(self, labels: Labels) -> SeriesState | None:
        """The state of a series, made at its first sample; None if the rule does not watch it."""
        try:
            return self.series[labels]
        except KeyError:
            rule = self.rule
            made = (
                series_for(rule, labels, self._scorer(), self.start_step, excused=self.excused)
                if rule.selector.matches(labels)
                else None
            )
            self.series[labels] = made
            return made

    def _scorer(self) -> Scorer:
        parts = getattr(self.rule.condition, "parts", None)
        if parts is None:
            return self.rule.condition.start()
        sides = iter(self.sides)
        mixed = [next(sides) if selector else condition for selector, condition in parts]
        return CombinedScorer(mixed, need_all=self.rule.condition.name == "all")

    def judge(self, sample: Sample, value: float, now: float, transitions: list[Transition] | None) -> None:
        """Feed one sample at its turn; what changed is kept in ``fresh``, ``cleared`` and ``again``."""
        series = self.series.get(sample.labels) or self.state_of(sample.labels)
        if series is not None and series.its_turn(sample.step):
            result = series.feed(value, sample.step, now)
            if result:
                self.mark(result, series, sample, transitions)

    def mark(
        self, result: int, series: SeriesState, sample: Sample | None, transitions: list[Transition] | None
    ) -> None:
        """Keep what one sample did until the evaluation is concluded."""
        if transitions is not None and result != AGAIN:
            transitions.append(
                Transition(
                    self.rule.id, series.name, series.last_step, series.before, series.state, series.value, series.score
                )
            )
        if result == CHANGED:
            return
        if result == AGAIN:
            self.again.append(series)
        elif result == FIRED:
            self.fresh.append(series)
        else:
            self.cleared.append(series)
        self.touched = True
        if sample is not None and result != CLEARED:
            self.fired_samples[series.labels] = sample

    def judge_siblings(self, samples: Sequence[Sample], now: float, transitions: list[Transition] | None) -> None:
        """``outlier``: each series against the median of its siblings along one label."""
        groups: dict[Labels, list[Sample]] = {}
        for sample in samples:
            if self.state_of(sample.labels) is not None and math.isfinite(sample.value):
                rest = tuple(pair for pair in sample.labels if pair[0] != self.across)
                groups.setdefault(rest, []).append(sample)
        for group in groups.values():
            if len(group) < 2:
                continue
            middle = median(s.value for s in group)
            if middle:
                for sample in group:
                    self.judge(sample, sample.value / middle, now, transitions)

    def judge_absence(
        self, silent_seconds: float | None, step: int, now: float, transitions: list[Transition] | None
    ) -> None:
        """``missing`` (steps since the last sample) and ``stale`` (seconds): by the clock.

        Until the first sample the condition's start-up budget ``first`` holds instead.

        :param silent_seconds: how long nothing at all has happened, which is what the heartbeat
            means; other metrics are silent since their own last sample. None for ``missing``.
        """
        if not self.series:
            self.state_of(NO_LABELS)
        first = getattr(self.rule.condition, "first", 0.0)
        for series in self.series.values():
            if series is None:
                continue
            if silent_seconds is None:
                silence = float(step - series.last_step)
            elif self.rule.selector.metric == "heartbeat" or series.first_time is None:
                silence = silent_seconds
            else:
                silence = now - series.first_time
            if not series.n and silence < first:
                continue
            score = series.scorer.update(silence, step)
            result = series.judge_score(0.0 if score is None else score, step, now)
            if result:
                self.mark(result, series, None, transitions)

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step: ``every``, ``cooldown`` and absence count from there."""
        if self.last_action_step is not None:
            self.last_action_step = min(self.last_action_step, step)
        for series in self.series.values():
            if series is not None:
                series.bucket = min(series.bucket, step // series.every - 1)
                series.last_step = min(series.last_step, step)

    def present(self, sample: Sample, now: float, transitions: list[Transition] | None) -> None:
        """A sample of a metric whose absence is watched has come."""
        series = self.state_of(sample.labels)
        if series is None:
            return
        if series.n and series.state is not State.FIRING:
            arrived = getattr(series.scorer, "arrived", None)
            if arrived is not None and series.first_time is not None:
                arrived(now - series.first_time)
        series.n += 1
        series.last_step = sample.step
        series.first_time = now
        score = series.scorer.update(0.0, sample.step)
        result = series.judge_score(0.0 if score is None else score, sample.step, now)
        if result:
            self.mark(result, series, sample, transitions)

    # -- alerts -----------------------------------------------------------------------

    def raise_alert(self, number: int, step: int, now: float, rank: int, *, repeat: bool = False) -> Alert:
        """One alert for all series that fired in this evaluation (or that go on, for a repeat)."""
        rule = self.rule
        members = self.again if repeat else self.fresh
        facts = sorted(map(self._fact, members), key=self._badness, reverse=True)
        worst = facts[0]
        sample = self.fired_samples.get(worst.labels)
        state = self.series[worst.labels]
        assert state is not None
        alert = Alert(
            rule=rule.id,
            number=number,
            severity=rule.severity,
            phase=sample.phase if sample is not None else rule.phase,
            episode=self.past_episodes + len(self.episodes) + (0 if repeat else 1),
            fired_step=sample.step if sample is not None else step,
            detected_step=step,
            value=worst.value,
            score=worst.score,
            normal=worst.normal,
            threshold=rule.condition.breaches.text,
            series=facts[:WORST],
            count=len(facts),
            fired_sample=state.n,
            rank=rank,
            hint=rule.hint,
            docs=rule.docs,
            tags=rule.tags,
            time=now,
            repeat=repeat,
        )
        if sample is not None and sample.detail is not None:
            try:
                alert.facts = dict(sample.detail())
            except Exception as error:  # facts are a courtesy: never lose the alert over them
                alert.facts = {"detail_error": f"{type(error).__name__}: {error}"}
        return alert

    def _fact(self, series: SeriesState) -> SeriesFact:
        return SeriesFact(series.name, series.labels, series.value, series.score, series.scorer.normal)

    def _badness(self, fact: SeriesFact) -> float:
        if not math.isfinite(fact.value) or fact.score is None:
            return math.inf
        return fact.score if getattr(self.rule.condition.breaches, "direction", 1) >= 0 else -fact.score

    def reset_marks(self) -> None:
        """Forget what this evaluation brought."""
        self.fresh: list[SeriesState] = []
        self.cleared: list[SeriesState] = []
        self.again: list[SeriesState] = []
        self.fired_samples: dict[Labels, Sample] = {}
        self.touched = False
