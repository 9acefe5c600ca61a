"""The state machine of one (rule, series, rank).

``no_data -> warming -> ok -> pending -> firing -> ok``. A missing sample changes nothing: it
neither fires nor clears. States and words: rule-language 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf, nextafter
from typing import TYPE_CHECKING

from healthcheck.protocols import Promise, Scorer, Skim
from healthcheck.rulelang.conditions.foresight import EVER
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import Labels, series_name
from healthcheck.verdicts import State

if TYPE_CHECKING:
    from healthcheck.engine.backlog import Backlog

NOTHING, FIRED, CLEARED, AGAIN, CHANGED, LOOK = 0, 1, 2, 3, 4, 5
"""What one sample did: nothing to report, an episode began, it ended, it goes on (breaching), or
the state changed without an alert (warming, ok, pending). LOOK: there is no series to feed yet."""

NOTHING_IS_QUIET = (inf, -inf)
"""For comparators of plugins that do not say where they are quiet."""

_NO_DATA, _WARMING, _OK, _PENDING, _FIRING = State.NO_DATA, State.WARMING, State.OK, State.PENDING, State.FIRING


class SeriesState:
    """Memory of one rule for one series. ``feed`` is the hot path of the engine."""

    __slots__ = (
        "backlog",
        "before",
        "breaches",
        "bucket",
        "calm_from",
        "calm_to",
        "clear_since",
        "clear_streak",
        "episodes",
        "every",
        "excused",
        "excused_count",
        "first_time",
        "hits",
        "labels",
        "last_step",
        "n",
        "name",
        "need",
        "nonfinite_ok",
        "peak",
        "peak_step",
        "quiet",
        "recent",
        "recover",
        "rule",
        "score",
        "scorer",
        "seconds",
        "since",
        "skim",
        "state",
        "streak",
        "update",
        "upward",
        "value",
        "warm_until",
        "warming",
    )

    def __init__(self, rule: Rule, labels: Labels, scorer: Scorer, start_step: int, *, excused: bool = False) -> None:
        hold = rule.hold
        self.rule = rule
        self.labels = labels
        self.name = series_name(rule.selector.metric, labels)
        self.scorer = scorer
        self.update = scorer.update
        self.skim: Skim | None = getattr(scorer, "skim", None)
        self.backlog: Backlog | None = None
        """Where its values wait while nothing can come of them."""
        self.breaches = rule.condition.breaches
        self.quiet: tuple[float, float] = getattr(rule.condition.breaches, "quiet", NOTHING_IS_QUIET)
        self.calm_from, self.calm_to = NOTHING_IS_QUIET
        """Scores within these bounds change nothing."""
        self.upward = getattr(rule.condition.breaches, "direction", 1) >= 0
        self.recover = rule.recover
        self.nonfinite_ok = rule.condition.judges_nonfinite
        self.excused = excused and not self.nonfinite_ok
        self.excused_count = 0
        """Non-finite samples left to the rule that owns them."""
        self.every = rule.every
        self.need = hold.need
        self.seconds = hold.seconds
        self.recent: deque[bool] | None = deque(maxlen=hold.of) if hold.of > hold.need else None
        """Of the last samples, which ones breached; those before the first breach are left out."""
        self.hits = 0
        """How many of them did."""
        self.warm_until = start_step + int(rule.warmup.amount) if rule.warmup.unit == "steps" else 0
        self.warming = bool(rule.warmup.amount) or rule.min_samples > 1
        self.state = State.NO_DATA
        self.before = State.NO_DATA
        """The state before the last change."""
        self.n = 0
        self.bucket = start_step // rule.every
        self.streak = self.clear_streak = 0
        self.since: float | None = None
        self.clear_since: float | None = None
        self.episodes = 0
        self.last_step = start_step
        self.first_time: float | None = None
        self.value = 0.0
        self.score: float | None = None
        self.peak = -inf
        """Closest approach: the score nearest to a breach, negated where lower is nearer."""
        self.peak_step = 0

    # -- the hot path -----------------------------------------------------------------

    def feed(self, x: float, step: int, now: float) -> int:
        """Judge one sample. Returns NOTHING, FIRED, CLEARED, AGAIN or CHANGED."""
        if x - x == 0.0 or self.nonfinite_ok:
            self.n += 1
            self.last_step = step
            self.value = x
            score = self.score = self.update(x, step)
            if score is None:
                return self._change(_WARMING) if self.state is _NO_DATA else NOTHING
            if self.calm_from <= score <= self.calm_to:
                return NOTHING
            if self.warming and not self._warm(step, now):
                return NOTHING if self.state is _FIRING else self._change(_WARMING)
            away = score if self.upward else -score
            if away > self.peak:
                self.peak = away
                self.peak_step = step
            low, high = self.quiet
            if self.state is _OK and low < score < high:
                result = NOTHING
            else:
                result = self._breach(now) if self.breaches(score) else self._healthy(now)
        else:  # NaN or infinity: a breach of every numeric rule, and never learned
            if self.excused:
                self.excused_count += 1
                return NOTHING
            self.n += 1
            self.last_step = step
            self.value = x
            self.score = None
            if self.warming and not self._warm(step, now):
                return NOTHING if self.state is _FIRING else self._change(_WARMING)
            result = self._breach(now)
        self._calm_down()
        return result

    @property
    def take(self) -> Callable[[float, int, float], int]:
        """What a sample is given to: ``feed``, at its turn."""
        return self.feed if self.every == 1 else self.feed_when_due

    def feed_when_due(self, x: float, step: int, now: float) -> int:
        """``feed`` for rules with ``every``: a value that comes late belongs to a bucket that was judged."""
        bucket = step // self.every
        if bucket <= self.bucket:
            return NOTHING
        self.bucket = bucket
        return self.feed(x, step, now)

    def foresee(self, last: float) -> Promise | None:
        """Which of the next values will change nothing, going by the scorer's word; None if it cannot tell.

        A state of OK says that the warm-up is over and that no breach is remembered.
        """
        if getattr(self.scorer, "blank", False) and self.state is not _NO_DATA:
            return -inf, inf, EVER
        if self.state is not _OK or self.quiet[0] >= self.quiet[1]:
            return None
        foresee: Callable[..., Promise | None] | None = getattr(self.scorer, "foresee", None)
        return None if foresee is None else foresee(last, *self.quiet)

    def catch_up(self, values: Sequence[float], steps: Sequence[int]) -> None:
        """Learn values that were foreseen to change nothing."""
        count = len(values)
        self.n += count
        self.last_step = steps[-1]
        self.value = values[-1]
        self._calm_down()
        skim, last, at, skim_at = self.skim, count - 1, 0, 0
        while at < count:
            if skim is not None and skim_at <= at < last:
                end = min(last, at + 64)
                done = skim(values[at:end], steps[at:end], self.calm_from, self.calm_to)
                if done:
                    at += done
                    continue
                skim_at = at + 8  # these are near the closest approach so far: one look at them all costs more
            score = self.score = self.update(values[at], steps[at])
            if score is not None and not self.calm_from <= score <= self.calm_to:
                self.peak = score if self.upward else -score
                self.peak_step = steps[at]
                self._calm_down()
            at += 1

    def _calm_down(self) -> None:
        """Find the scores that would change nothing: no breach, and no closer approach than there was."""
        if self.state is not _OK:
            self.calm_from, self.calm_to = NOTHING_IS_QUIET
            return
        low, high = self.quiet
        self.calm_from, self.calm_to = nextafter(low, inf), nextafter(high, -inf)
        if self.upward:
            self.calm_to = min(self.calm_to, self.peak)
        else:
            self.calm_from = max(self.calm_from, -self.peak)

    def judge_score(self, score: float, step: int, now: float) -> int:
        """Judge a score that the clock produced (``missing``, ``stale``)."""
        self.score = self.value = score
        if score > self.peak:
            self.peak = score
            self.peak_step = step
        if self.breaches(score):
            return self._breach(now)
        return NOTHING if self.state is _OK else self._healthy(now)

    def _warm(self, step: int, now: float) -> bool:
        """Whether the warm-up is over; once it is, it is not asked again."""
        warmup = self.rule.warmup
        if warmup.unit == "samples":
            warm = self.n > warmup.amount
        elif warmup.unit == "seconds":
            if self.first_time is None:
                self.first_time = now
            warm = now - self.first_time >= warmup.amount
        else:
            warm = step > self.warm_until
        if warm and self.n >= self.rule.min_samples:
            self.warming = False
            return True
        return False

    def _change(self, state: State) -> int:
        if state is self.state:
            return NOTHING
        self.before = self.state
        self.state = state
        return CHANGED

    def _breach(self, now: float) -> int:
        self.clear_streak = 0
        self.clear_since = None
        self.streak += 1
        if self.recent is not None:
            self._remember(self.recent, True)
        if self.state is _FIRING:
            return AGAIN
        if self.seconds:
            if self.since is None:
                self.since = now
            enough = now - self.since >= self.seconds
        elif self.recent is not None:
            enough = self.hits >= self.need
        else:
            enough = self.streak >= self.need
        if enough:
            self._change(_FIRING)
            self.episodes += 1
            return FIRED
        return self._change(_PENDING)

    def _healthy(self, now: float) -> int:
        self.streak = 0
        self.since = None
        if self.hits and self.recent is not None:
            self._remember(self.recent, False)
        if self.state is not _FIRING:
            return self._change(_PENDING if self.hits else _OK)
        if self.recover is not None and (self.score is None or not self.recover(self.score)):
            self.clear_streak = 0
            self.clear_since = None
            return NOTHING
        self.clear_streak += 1
        if self.seconds:
            if self.clear_since is None:
                self.clear_since = now
            enough = now - self.clear_since >= self.seconds
        else:
            enough = self.clear_streak >= self.need
        if not enough:
            return NOTHING
        self._change(_OK)
        self.clear_streak = 0
        self.clear_since = None
        if self.recent is not None:
            self.recent.clear()
            self.hits = 0
        return CLEARED

    def _remember(self, recent: deque[bool], breach: bool) -> None:
        if len(recent) == recent.maxlen:
            self.hits -= recent[0]
        recent.append(breach)
        self.hits += breach
