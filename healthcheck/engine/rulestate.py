"""One cause of a rule at work: its series, what fires, its closest approach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, cast

from healthcheck.core.alerts import Finding, SeriesFact, State, Transition
from healthcheck.core.protocols import FINITE, AbsenceScorer, Condition
from healthcheck.core.samples import NO_LABELS, Labels, Sample
from healthcheck.engine.series import AGAIN, CHANGED, CLEARED, FIRED, SeriesState
from healthcheck.rulelang.comparators import closeness
from healthcheck.rulelang.rule import Cause, Selector

WORST = 5
"""How many series an alert names."""


class Side:
    """One part of a condition that watches another metric; shared by all series of its rule."""

    __slots__ = ("_breaches", "breach", "condition", "high", "low", "scorer", "selector", "settled")

    def __init__(self, selector: Selector, condition: Condition) -> None:
        self.selector = selector
        self.condition = condition
        self.scorer = condition.start()
        self.breach: bool | None = None
        """Whether the last value that was scored breaches; None before the first score."""
        self._breaches = condition.breaches
        self._settle()

    def score(self, value: float, step: int) -> None:
        """Score a value of a series that the selector matches."""
        if value - value != 0.0 and not self.condition.judges_nonfinite:
            self.breach = True  # non-finite breaches every numeric condition
            return
        breaches = self._breaches
        low, high = breaches.healthy.low, breaches.healthy.high
        found = self.scorer.update((value,), (step,), breaches.healthy)
        if not found:
            self.breach = False
        elif (score := found[0][0]) is not None:
            self.breach = (score < low or score > high) if breaches.exact else breaches(score)
        if self.scorer.memoryless:
            self._settle()

    def _settle(self) -> None:
        """Whether the value alone says if it breaches: then only those from ``low`` to ``high`` do not."""
        self.settled = self.scorer.memoryless and self._breaches.exact
        if self.settled:
            bound = self.scorer.bound(self._breaches.healthy) or FINITE
            self.low, self.high = max(bound.low, FINITE.low), min(bound.high, FINITE.high)

    def state(self) -> Any:
        return {"breach": self.breach, "scorer": self.scorer.state()}

    def restore(self, state: Any) -> None:
        self.breach = state["breach"]
        self.scorer.restore(state["scorer"])
        self._settle()


class CauseState:
    """Everything the engine knows about one cause in one run. Episodes are of the rule: engine/episodes.py."""

    __slots__ = (
        "across",
        "again",
        "cleared",
        "every_score",
        "excused",
        "findings",
        "fired_samples",
        "firing",
        "fresh",
        "held",
        "phase",
        "rule",
        "series",
        "shut",
        "sides",
        "start_step",
        "touched",
    )

    def __init__(self, rule: Cause, start_step: int, *, excused: bool, every_score: bool = False) -> None:
        self.rule = rule
        self.every_score = every_score
        self.excused = excused
        """Another rule owns non-finite samples of this metric (rule-language 5.3)."""
        self.phase = rule.phase
        self.across = rule.condition.across
        self.shut = False
        """A guard of ``only_if`` does not hold just now."""
        self.start_fresh(start_step)

    def start_fresh(self, start_step: int) -> None:
        """Begin with nothing seen, after ``start_step``."""
        self.start_step = start_step
        self.series: dict[Labels, SeriesState | None] = {}
        self.sides = [Side(selector, part) for selector, part in self.rule.condition.parts if selector]
        self.firing: set[Labels] = set()
        """Series that fire."""
        self.findings: list[Finding] = []
        """What it found in the episodes of its rule."""
        self.held = 0
        """Samples that ``only_if`` held back."""
        self.reset_marks()

    @property
    def samples(self) -> int:
        """Samples that were judged or left to the owner of non-finite values."""
        return sum(s.n + s.excused_count for s in self.series.values() if s is not None)

    @property
    def closest(self) -> tuple[float, int] | None:
        """Score and step of the closest approach."""
        found: tuple[float, int] | None = None
        for series in self.series.values():
            if series is None or series.closest is None:
                continue
            if found is None or self.rule.condition.breaches.closer(series.closest, found[0]):
                found = series.closest, series.closest_step
        return found

    # -- judging ----------------------------------------------------------------------

    def state_of(self, labels: Labels) -> SeriesState | None:
        """The state of a series, made at its first sample; None if the rule does not watch it."""
        try:
            return self.series[labels]
        except KeyError:
            # None is kept as well: matching globs against thousands of parameters must not happen at every step.
            made = self.fresh_series(labels) if self.rule.selector.matches(labels) else None
            self.series[labels] = made
            return made

    def fresh_series(self, labels: Labels) -> SeriesState:
        """The state of a series before its first sample."""
        return SeriesState(
            self.rule,
            labels,
            self.rule.condition.start(*self.sides),
            self.start_step,
            excused=self.excused,
            every_score=self.every_score,
        )

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
                    self.rule.rule,
                    series.name,
                    series.last_step,
                    series.before,
                    series.state,
                    series.value,
                    series.score,
                    self.rule.name,
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
                continue  # alone there is nothing to differ from
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
        first = self.rule.condition.first
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
            result = series.judge_silence(silence, step, now)
            if result:
                self.mark(result, series, None, transitions)

    def warm_up_again(self, step: int) -> None:
        """Its rule applies from now on: what was learnt stays, the warm-up begins here."""
        self.start_step = step
        for series in self.series.values():
            if series is not None:
                series.rest(step)
        self.firing.clear()

    def rewind(self, step: int) -> None:
        """The run goes on at an earlier step: ``every`` and absence count from there."""
        for series in self.series.values():
            if series is not None:
                series.bucket = min(series.bucket, step // series.every - 1)
                series.last_step = min(series.last_step, step)

    def present(self, sample: Sample, now: float, transitions: list[Transition] | None) -> None:
        """A sample of a metric whose absence is watched has come."""
        series = self.state_of(sample.labels)
        if series is None:
            return
        # A gap that was called an alert is not what is usual: learnt, it would excuse the next one.
        if series.n and series.state is not State.FIRING and series.first_time is not None:
            cast("AbsenceScorer", series.scorer).arrived(now - series.first_time)
        series.n += 1
        series.last_step = sample.step
        series.first_time = now
        result = series.judge_silence(0.0, sample.step, now)
        if result:
            self.mark(result, series, sample, transitions)

    # -- what it found ----------------------------------------------------------------

    def find(self, order: int, step: int, *, repeat: bool = False) -> Finding:
        """What all series that fired in this evaluation found (or those that go on, for a repeat).

        :param order: its place among the causes of the rule.
        """
        rule = self.rule
        members = self.again if repeat else self.fresh
        facts = sorted(map(_fact, members), key=self._badness, reverse=True)
        worst = facts[0]
        sample = self.fired_samples.get(worst.labels)
        state = self.series[worst.labels]
        assert state is not None
        steps = [s.step for s in self.fired_samples.values() if any(m.labels == s.labels for m in members)]
        finding = Finding(
            cause=rule.name,
            kind=rule.kind,
            severity=rule.severity,
            phase=sample.phase if sample is not None else rule.phase,
            fired_step=min(steps, default=step),
            detected_step=step,
            value=worst.value,
            score=worst.score,
            normal=worst.normal,
            threshold=rule.condition.breaches.text,
            series=facts[:WORST],
            count=len(facts),
            fired_sample=state.n,
            order=order,
            hint=rule.hint,
            docs=rule.docs,
            tags=rule.tags,
        )
        if sample is not None and sample.detail is not None:
            try:
                finding.facts = dict(sample.detail())
            except Exception as error:  # facts are a courtesy: never lose the alert over them
                finding.facts = {"detail_error": f"{type(error).__name__}: {error}"}
        return finding

    def _badness(self, fact: SeriesFact) -> tuple[bool, Any]:
        """Sorts the worst last. What is no number is worse than any."""
        if fact.score is None or not math.isfinite(fact.value):
            return True, 0
        return False, closeness(self.rule.condition.breaches)(fact.score)

    def reset_marks(self) -> None:
        """Forget what this evaluation brought."""
        self.fresh: list[SeriesState] = []
        self.cleared: list[SeriesState] = []
        self.again: list[SeriesState] = []
        self.fired_samples: dict[Labels, Sample] = {}
        self.touched = False

    # -- resume -----------------------------------------------------------------------

    def save(self, now: float) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fingerprint": self.rule.fingerprint,
            "start_step": self.start_step,
            "series": [series.save(now) for series in self.series.values() if series is not None],
            "sides": [side.state() for side in self.sides],
            "firing": [[list(pair) for pair in labels] for labels in sorted(self.firing)],
            "held": self.held,
        }

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """The inverse of :meth:`save`; raises whatever a state that cannot be read gives."""
        self.start_step = saved["start_step"]  # series that are still to come warm up from there
        for entry in saved["series"]:
            series = self.state_of(tuple((name, value) for name, value in entry["labels"]))
            if series is not None:
                series.restore(entry, now)
        for side, memory in zip(self.sides, saved["sides"], strict=True):
            side.restore(memory)
        self.firing = {tuple((name, value) for name, value in labels) for labels in saved["firing"]}
        self.held = saved["held"]


def _fact(series: SeriesState) -> SeriesFact:
    return SeriesFact(series.name, series.labels, series.value, series.score, series.normal)
