"""The state machine of one (rule, series, rank).

``no_data -> warming -> ok -> pending -> firing -> ok``. A missing sample changes nothing: it
neither fires nor clears. States and words: rule-language 5.2.
"""

from __future__ import annotations

from collections import deque
from math import inf

from healthcheck.protocols import Scorer
from healthcheck.rulelang.comparators import as_bounds
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import Labels, series_name
from healthcheck.verdicts import State

NOTHING, FIRED, CLEARED, AGAIN, CHANGED = 0, 1, 2, 3, 4
"""What one sample did: nothing to report, an episode began, it ended, it goes on and may act again
(``cooldown``), or the state changed without an alert (warming, ok, pending)."""

NOTHING_IS_CALM = (inf, -inf)
"""Bounds between which there is nothing."""

_NO_DATA, _WARMING, _OK, _PENDING, _FIRING = State.NO_DATA, State.WARMING, State.OK, State.PENDING, State.FIRING


class SeriesState:
    """Memory of one rule for one series. The engine passes over values that change nothing; ``judge`` takes the others."""

    __slots__ = (
        "before",
        "bounds",
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
        "idle_from",
        "idle_to",
        "labels",
        "last_step",
        "n",
        "name",
        "need",
        "nonfinite_ok",
        "peak",
        "peak_step",
        "recent",
        "recover",
        "rule",
        "score",
        "scorer",
        "seconds",
        "since",
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
        self.bounds = as_bounds(rule.condition.breaches)
        self.calm_from, self.calm_to = NOTHING_IS_CALM
        """Scores within these bounds change nothing: the engine only notes them."""
        self.idle_from, self.idle_to = NOTHING_IS_CALM
        """Values within these bounds change nothing and need no score: the engine only notes them."""
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

    def feed(self, value: float, step: int, now: float) -> int:
        """Score a value and judge it. Returns what came of it: NOTHING, FIRED, CLEARED, AGAIN or CHANGED."""
        scored = value - value == 0.0 or self.nonfinite_ok
        return self.judge(value, self.update(value, step) if scored else None, step, now)

    def judge(self, value: float, score: float | None, step: int, now: float) -> int:
        """The same for a value that was scored: None if it cannot be judged yet, or must not be learnt from."""
        was_ok = self.state is _OK
        finite = value - value == 0.0 or self.nonfinite_ok
        if not finite and self.excused:
            self.excused_count += 1
            return NOTHING
        self.n += 1
        self.last_step = step
        self.value = value
        self.score = score
        if finite and score is None:
            return self._change(_WARMING) if self.state is _NO_DATA else NOTHING
        if self.warming and not self._warm(step, now):
            return NOTHING if self.state is _FIRING else self._change(_WARMING)
        if score is None:  # NaN or infinity: a breach of every numeric rule
            result = self._breach(now)
        else:
            away = score if self.upward else -score
            if away > self.peak:
                self.peak = away
                self.peak_step = step
            low, high, test = self.bounds
            if was_ok and low <= score <= high:
                result = NOTHING
            elif (score < low or score > high) if test is None else test(score):
                result = self._breach(now)
            else:
                result = self._healthy(now)
        if was_ok or self.state is _OK:
            self.calm_down()
        return result

    def its_turn(self, step: int) -> bool:
        """Whether a value of this step is judged: with ``every`` one of each bucket, and none that comes late."""
        if self.every == 1:
            return True
        bucket = step // self.every
        if bucket <= self.bucket:
            return False
        self.bucket = bucket
        return True

    def calm_down(self) -> None:
        """Find the scores that would change nothing: no breach, and no closer approach than there was.

        A state of OK says that the warm-up is over and that no breach is remembered.
        """
        if self.state is not _OK:
            self.calm_from, self.calm_to = NOTHING_IS_CALM
            return
        self.calm_from, self.calm_to, _ = self.bounds
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
        if self.rule.condition.breaches(score):
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
            return NOTHING if self.rule.cooldown is None else AGAIN
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
