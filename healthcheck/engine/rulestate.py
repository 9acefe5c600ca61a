"""One cause of a rule at work: its series, what fires, its closest approach, and what it found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

from healthcheck.core.alerts import Finding, SeriesFact, Severity, State
from healthcheck.core.protocols import FINITE, AbsenceScorer, Condition
from healthcheck.core.samples import NO_LABELS, Labels, Sample
from healthcheck.engine.series import AGAIN, CLEARED, FIRED, NOTHING, WORSE, Mark, SeriesState
from healthcheck.extend.guard import describe
from healthcheck.rulelang.comparators import closeness
from healthcheck.rulelang.rule import Cause, Mute, Selector

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

    def run(self, values: Sequence[float], steps: Sequence[int]) -> list[bool | None]:
        """Score values of a series that the selector matches; whether each breaches."""
        breaches = self._breaches
        low, high = breaches.healthy.low, breaches.healthy.high
        if self.settled:
            said: list[bool | None] = [not self.low <= value <= self.high for value in values]
            self.breach = said[-1]
            return said
        said = []
        begin = end = 0
        total = values[0] if len(values) == 1 else sum(values)
        if self.condition.judges_nonfinite or total - total == 0.0:
            end = len(values)
        while begin < len(values):
            while end < len(values) and math.isfinite(values[end]):
                end += 1
            if end > begin:
                whole = end - begin == len(values)
                part, which = (values, steps) if whole else (values[begin:end], steps[begin:end])
                found = self.scorer.update(part, which, breaches.healthy)
                quiet = end - begin - len(found)
                said += [False] * quiet
                if quiet:
                    self.breach = False
                for score, _ in found:
                    if score is not None:
                        self.breach = (score < low or score > high) if breaches.exact else breaches(score)
                    said.append(self.breach)
            if end < len(values):
                self.breach = True  # non-finite breaches every numeric condition
                said.append(True)
                end += 1
            begin = end
        if self.scorer.memoryless:
            self._settle()
        return said

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
        "cause",
        "changes",
        "cleared",
        "every_score",
        "excused",
        "findings",
        "fired_samples",
        "firing",
        "fresh",
        "held",
        "past",
        "phase",
        "series",
        "shut",
        "sides",
        "start_step",
        "starts",
        "worse",
    )

    def __init__(self, cause: Cause, start_step: int, *, excused: bool, every_score: bool = False) -> None:
        self.cause = cause
        self.every_score = every_score
        self.excused = excused
        """Another rule owns non-finite samples of this metric (rule-language 5.3)."""
        self.phase = cause.phase
        self.across = cause.condition.across
        self.shut = False
        """A guard of ``only_if`` does not hold just now."""
        self.changes: list[tuple[int, CauseState | Side, bool | None]] = []
        """Where in the block at hand a guard or a part on another metric says something else: ``(moment, whose, what)``."""
        self.starts: list[tuple[CauseState | Side, bool | None]] = []
        """What these said before the block."""
        self.start_fresh(start_step)

    def start_fresh(self, start_step: int) -> None:
        """Begin with nothing seen, after ``start_step``."""
        self.series: dict[Labels, SeriesState | None] = {}
        self.past: list[SeriesState] = []
        """Series of other runs, which came before in the same record."""
        self.begin_again(start_step)
        self.findings: list[Finding] = []
        """What it found in the episodes of its rule."""
        self.held = 0
        """Samples that ``only_if`` held back."""

    def begin_again(self, start_step: int) -> None:
        """Another run, after ``start_step``: what was judged and found stays, what was learnt does not hold for it."""
        self.start_step = start_step
        self.past += self._known()
        self.series = {}
        self.sides = [Side(selector, part) for selector, part in self.cause.condition.parts if selector]
        self.firing: set[Labels] = set()
        """Series that fire."""
        self.reset_marks()

    def judged(self) -> list[SeriesState]:
        """All series, those of runs before in the same record too."""
        return [*self.past, *(s for s in self.series.values() if s is not None)]

    @property
    def samples(self) -> int:
        """Samples that were judged or left to the owner of non-finite values."""
        return sum(s.n + s.excused_count for s in self.judged())

    @property
    def closest(self) -> tuple[float, int] | None:
        """Score and step of the closest approach."""
        found: tuple[float, int] | None = None
        for series in self.judged():
            if series.closest is None:
                continue
            near = series.closest, series.closest_step
            if found is None or self.cause.condition.breaches.closer(near[0], found[0]):
                found = near
            elif near[1] < found[1] and not self.cause.condition.breaches.closer(found[0], near[0]):
                found = near  # equally close, and earlier
        return found

    def _known(self) -> list[SeriesState]:
        """Its series, in an order that does not depend on which of them came first."""
        known = [series for series in self.series.values() if series is not None]
        return known if len(known) < 2 else sorted(known, key=lambda series: series.labels)

    # -- judging ----------------------------------------------------------------------

    def state_of(self, labels: Labels) -> SeriesState | None:
        """The state of a series, made at its first sample; None if the rule does not watch it."""
        try:
            return self.series[labels]
        except KeyError:
            # None is kept as well: matching globs against thousands of parameters must not happen at every step.
            made = self.fresh_series(labels) if self.cause.selector.matches(labels) else None
            self.series[labels] = made
            return made

    def fresh_series(self, labels: Labels) -> SeriesState:
        """The state of a series before its first sample."""
        return SeriesState(
            self.cause,
            labels,
            self.cause.condition.start(*self.sides),
            self.start_step,
            excused=self.excused,
            every_score=self.every_score,
        )

    def judge_siblings(self, samples: Sequence[Sample], now: float) -> list[tuple[Sample, Mark]]:
        """``outlier``: each series against the median of its siblings along one label."""
        groups: dict[Labels, list[Sample]] = {}
        for sample in samples:
            if self.state_of(sample.labels) is not None and math.isfinite(sample.value):
                rest = tuple(pair for pair in sample.labels if pair[0] != self.across)
                groups.setdefault(rest, []).append(sample)
        marks = []
        for group in groups.values():
            if len(group) < 2:
                continue  # alone there is nothing to differ from
            middle = median(s.value for s in group)
            if not middle:
                continue
            for sample in group:
                series = self.series[sample.labels]
                if series is not None and series.its_turn(sample.step):
                    marks += [(sample, mark) for mark in series.run((sample.value / middle,), (sample.step,), (now,))]
        return marks

    def judge_absence(self, silent_seconds: float | None, step: int, now: float) -> list[Mark]:
        """``missing`` (steps since the last sample) and ``stale`` (seconds): by the clock.

        Until the first sample the condition's start-up budget ``first`` holds instead.

        :param silent_seconds: how long nothing at all has happened, which is what the heartbeat
            means; other metrics are silent since their own last sample. None for ``missing``.
        """
        if not self.series:
            self.state_of(NO_LABELS)
        first = self.cause.condition.first
        marks = []
        for series in self._known():
            if silent_seconds is None:
                silence = float(step - series.last_step)
            elif self.cause.selector.metric == "heartbeat" or series.first_time is None:
                silence = silent_seconds
            else:
                silence = now - series.first_time
            if not series.n and silence < first:
                continue
            result = series.judge_silence(silence, step, now)
            if result:
                marks.append(Mark(series, result))
        return marks

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

    def present(self, labels: Labels, step: int, now: float) -> Mark | None:
        """A sample of a metric whose absence is watched has come."""
        series = self.state_of(labels)
        if series is None:
            return None
        # A gap that was called an alert is not what is usual: learnt, it would excuse the next one.
        if series.n and series.state is not State.FIRING and series.first_time is not None:
            cast("AbsenceScorer", series.scorer).arrived(now - series.first_time)
        series.n += 1
        series.last_step = step
        series.first_time = now
        result = series.judge_silence(0.0, step, now)
        return None if result == NOTHING else Mark(series, result)

    # -- what it found ----------------------------------------------------------------

    def find(self, order: int, step: int, *, repeat: bool = False) -> Finding:
        """What all series that fired in this evaluation found (or those that go on, for a repeat).

        :param order: its place among the causes of the rule.
        """
        cause = self.cause
        members = self.again if repeat else self.fresh
        facts = sorted(map(_fact, members), key=self._badness, reverse=True)
        worst = facts[0]
        sample = self.fired_samples.get(worst.labels)
        n = next(mark.n for mark in members if mark.labels == worst.labels)
        steps = [s.step for s in self.fired_samples.values() if any(m.labels == s.labels for m in members)]
        finding = Finding(
            cause=cause.name,
            kind=cause.kind,
            severity=cause.severity,
            phase=sample.phase if sample is not None else cause.phase,
            fired_step=min(steps, default=step),
            detected_step=step,
            value=worst.value,
            score=worst.score,
            normal=worst.normal,
            threshold=cause.condition.breaches.text,
            series=facts[:WORST],
            count=len(facts),
            fired_sample=n,
            order=order,
            hint=cause.hint,
            docs=cause.docs,
            tags=cause.tags,
        )
        if sample is not None and sample.detail is not None:
            try:
                finding.facts = dict(sample.detail())
                finding.where = str(finding.facts.pop("where", ""))
            except Exception as error:  # facts are a courtesy: never lose the alert over them
                finding.facts = {"detail_error": describe(error)}
        return finding

    def _badness(self, fact: SeriesFact) -> tuple[bool, Any]:
        """Sorts the worst last. What is no number is worse than any."""
        if fact.score is None or not math.isfinite(fact.value):
            return True, 0
        return False, closeness(self.cause.condition.breaches)(fact.score)

    def note(self, mark: Mark, sample: Sample | None) -> None:
        """Keep what one sample did until its evaluation is concluded."""
        if mark.result == AGAIN:
            self.again.append(mark)
        elif mark.result == WORSE:
            self.worse = True
        elif mark.result == FIRED:
            self.fresh.append(mark)
        else:
            self.cleared.append(mark)
        if sample is not None and mark.result not in (CLEARED, WORSE):
            self.fired_samples[mark.labels] = sample

    def reset_marks(self) -> None:
        """Forget what this evaluation brought."""
        self.fresh: list[Mark] = []
        self.cleared: list[Mark] = []
        self.again: list[Mark] = []
        self.worse = False
        """One of its series has fired for so long that it is an error."""
        self.fired_samples: dict[Labels, Sample] = {}

    # -- resume -----------------------------------------------------------------------

    def save(self, now: float) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fingerprint": self.cause.fingerprint,
            "start_step": self.start_step,
            "series": [series.save(now) for series in self._known()],
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


def _fact(mark: Mark) -> SeriesFact:
    return SeriesFact(mark.name, mark.labels, mark.value, mark.score, mark.normal)


# --------------------------------------------------------------------------------------------------
# What a cause found, as it is read: what mutes it, how far a record can be believed, its message.


def mute(finding: Finding, name: str, mutes: Iterable[Mute], hits: dict[int, int]) -> None:
    """Mark what a mute covers; ``hits`` counts what each mute was good for."""
    for index, entry in enumerate(mutes):
        if entry.covers(name, finding.fired_step):
            finding.muted = entry.reason
            hits[index] = hits.get(index, 0) + 1


def cap(cause: Cause, finding: Finding, unknown: Callable[[str], bool]) -> None:
    """In a record that cannot know its guard, an error is a note: the record does not say whether it is one at all."""
    missing = unsaid(cause, unknown)
    if missing and finding.severity > Severity.WARNING:
        finding.severity = Severity.INFO
        finding.facts.setdefault("capped", "the record does not say " + ", ".join(missing))


def unsaid(cause: Cause, unknown: Callable[[str], bool]) -> list[str]:
    """Metrics of its guards of which a record does not say anything."""
    return [g.metric for g in cause.only_if if g.test.text != "absent" and unknown(g.metric)]


def message(cause: Cause, finding: Finding, rank: int) -> str:
    """The message of a cause, its placeholders filled in."""
    assert cause.message is not None, "the rule compiler gives every cause a message"
    fields: dict[str, Any] = {
        "value": finding.value,
        "score": finding.score,
        "normal": finding.normal,
        "threshold": finding.threshold,
        "window": cause.condition.window,
        "step": finding.fired_step,
        "epoch": None,
        "rule": cause.rule,
        "series": finding.series[0].name if finding.series else cause.selector.metric,
        "rank": rank,
        "count": finding.count,
    }
    return cause.message(fields)
