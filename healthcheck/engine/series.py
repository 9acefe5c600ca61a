"""The state machine of one (rule, series, rank).

``no_data -> warming -> ok -> pending -> firing -> ok``. A missing sample changes nothing: it
neither fires nor clears. States and words: rule-language 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.alerts import Kind, State
from healthcheck.core.protocols import EMPTY, FINITE, Bound, Comparator, Scored, Scorer
from healthcheck.core.samples import Labels, series_name
from healthcheck.core.text import decode_number, encode_number
from healthcheck.rulelang.rule import Cause

NOTHING, FIRED, CLEARED, AGAIN, CHANGED, WORSE = 0, 1, 2, 3, 4, 5
"""What one sample did: nothing to report, an episode began, it ended, it goes on and may act again
(``cooldown``), the state changed without an alert (warming, ok, pending), or an episode has gone on for so long that it
is an error (``error_after``)."""

_NO_DATA, _WARMING, _OK, _PENDING, _FIRING = State.NO_DATA, State.WARMING, State.OK, State.PENDING, State.FIRING
_LEAST, _MOST = FINITE.low, FINITE.high
_COUNTS = (
    "n",
    "bucket",
    "streak",
    "clear_streak",
    "episodes",
    "last_step",
    "warm_until",
    "warming",
    "excused_count",
    "closest_step",
    "breached_since",
)
_TIMES = ("since", "clear_since", "first_time")

PATIENCE, PATIENT = 4, 4
"""How much longer an episode must be over each time after the second, and how often that grows."""


class Mark:
    """What one sample changed, and how its series stood then: the run goes on before anybody looks at it."""

    __slots__ = ("after", "before", "labels", "last_step", "n", "name", "normal", "place", "result", "score", "value")

    def __init__(self, series: SeriesState, result: int, place: int = 0) -> None:
        self.place = place
        """Of the sample in its run."""
        self.result = result
        self.name, self.labels = series.name, series.labels
        self.before, self.after = series.before, series.state
        self.n, self.last_step = series.n, series.last_step
        self.value, self.score, self.normal = series.value, series.score, series.normal


class SeriesState:
    """Memory of one rule for one series.

    Most samples change nothing, and calls are what costs. So the state says beforehand of which ones that is known:
    those with a ``quiet`` score, and those whose value lies from ``idle_from`` to ``idle_to``. The engine counts
    these and hands the others to :meth:`judge`.

    :param every_score: nothing is known beforehand: each sample is judged, so that ``score`` is that of the last one.
    """

    __slots__ = (
        "before",
        "breached_since",
        "breaches",
        "bucket",
        "cause",
        "clear_since",
        "clear_streak",
        "closest",
        "closest_step",
        "direction",
        "episodes",
        "every",
        "every_score",
        "excused",
        "excused_count",
        "first_time",
        "flips",
        "healthy",
        "hits",
        "idle_from",
        "idle_to",
        "labels",
        "last_step",
        "n",
        "name",
        "need",
        "nonfinite_ok",
        "normal",
        "quiet",
        "recent",
        "recover",
        "score",
        "scorer",
        "seconds",
        "since",
        "state",
        "streak",
        "test",
        "update",
        "value",
        "warm_until",
        "warming",
    )

    def __init__(
        self,
        cause: Cause,
        labels: Labels,
        scorer: Scorer,
        start_step: int,
        *,
        excused: bool = False,
        every_score: bool = False,
    ) -> None:
        hold = cause.hold
        self.cause = cause
        self.labels = labels
        self.name = series_name(cause.selector.metric, labels)
        self.scorer = scorer
        self.update = scorer.update
        self.breaches = cause.condition.breaches
        self.direction = self.breaches.direction
        self.healthy = self.breaches.healthy
        self.test: Comparator | None = None if self.breaches.exact else self.breaches
        """The comparator, if scores outside of its healthy ones may be healthy as well."""
        self.every_score = every_score
        self.quiet: Bound = EMPTY
        """Scores that change nothing."""
        self.idle_from, self.idle_to = EMPTY.low, EMPTY.high
        """Values with such scores, where the score depends on the value alone."""
        self.recover = cause.recover
        self.nonfinite_ok = cause.condition.judges_nonfinite
        self.excused = excused and not self.nonfinite_ok
        self.excused_count = 0
        """Non-finite samples left to the cause that owns them."""
        self.every = cause.every
        self.need = hold.need
        self.seconds = hold.seconds
        self.flips = cause.kind is not Kind.FACT and all(spec.stage == "observe" for spec in cause.actions)
        """Whether it may turn around its threshold and nothing is done about it but to say so."""
        self.recent: deque[bool] | None = deque(maxlen=hold.of) if hold.of > hold.need else None
        """Of the last samples, which ones breached; those before the first breach are left out."""
        self.hits = 0
        """How many of them did."""
        self.warm_until = start_step + int(cause.warmup.amount) if cause.warmup.unit == "steps" else 0
        self.warming = bool(cause.warmup.amount) or cause.min_samples > 1
        self.state = State.NO_DATA
        self.before = State.NO_DATA
        """The state before the last change."""
        self.n = 0
        self.bucket = start_step // cause.every
        self.streak = self.clear_streak = 0
        self.since: float | None = None
        self.clear_since: float | None = None
        self.episodes = 0
        self.breached_since = 0
        """Samples that breached since it fires."""
        self.last_step = start_step
        self.first_time: float | None = None
        self.value = 0.0
        """The last sample."""
        self.score: float | None = None
        """Of the last sample that was judged; ``normal`` likewise."""
        self.normal: float | None = None
        self.closest: float | None = None
        """Closest approach: the score nearest to a breach so far."""
        self.closest_step = 0

    # -- judging ----------------------------------------------------------------------

    def run(self, values: Sequence[float], steps: Sequence[int], times: Sequence[float]) -> list[Mark]:
        """Score a run of values and judge each by its own clock; returns what came of it.

        :param times: seconds of active training, one for each value.
        """
        count = len(values)
        if self.nonfinite_ok:
            return self.take(self.update(values, steps, self.quiet), values, steps, times, 0, count)
        marks: list[Mark] = []
        begin = end = 0
        while begin < count:
            # NaN and infinity are a breach of every numeric rule, and are not scored.
            while end < count and (value := values[end]) - value == 0.0:
                end += 1
            if end > begin:
                whole = end - begin == count
                part, which = (values, steps) if whole else (values[begin:end], steps[begin:end])
                marks += self.take(self.update(part, which, self.quiet), values, steps, times, begin, end)
            if end < count:
                result = self.judge(values[end], None, self.scorer.normal, steps[end], times[end])
                if result:
                    marks.append(Mark(self, result, end))
                end += 1
            begin = end
        return marks

    def take(
        self,
        found: Sequence[Scored],
        values: Sequence[float],
        steps: Sequence[int],
        times: Sequence[float],
        begin: int,
        end: int,
    ) -> list[Mark]:
        """Judge the values from ``begin`` to ``end``, of which the last were ``found`` to have scores that are not quiet."""
        marks: list[Mark] = []
        place = end - len(found)
        if place > begin:
            self.n += place - begin
            self.last_step, self.value = steps[place - 1], values[place - 1]
        quiet, closer = self.quiet, False
        for score, normal in found:
            value = values[place]
            if score is None:
                known = self.n > 0  # the first one says that there is data
            elif quiet.low <= score <= quiet.high:
                self.n += 1
                self.last_step, self.value = steps[place], value
                place += 1
                continue
            else:
                # A value that rises comes here at each step: what `judge` would do is written out for it.
                closest = self.closest
                known = (
                    quiet is not EMPTY
                    and closest is not None
                    and (score > closest if self.direction > 0 else self.direction < 0 and score < closest)
                    and self.healthy.low <= score <= self.healthy.high
                    and not self.warming
                )
                if known:
                    closer = True
                    self.closest, self.closest_step = score, steps[place]
                    if self.direction > 0:
                        quiet.high = score
                    else:
                        quiet.low = score
            if known:
                self.n += 1
                self.last_step, self.value = steps[place], value
                self.score, self.normal = score, normal
            else:
                result = self.judge(value, score, normal, steps[place], times[place])
                if result:
                    marks.append(Mark(self, result, place))
                quiet = self.quiet
            place += 1
        if closer and self.scorer.memoryless:
            self.find_quiet()
        return marks

    def judge(self, value: float, score: float | None, normal: float | None, step: int, now: float) -> int:
        """The same for a value that was scored: None if it cannot be judged yet, or must not be learnt from."""
        was_ok = self.state is _OK
        finite = value - value == 0.0 or self.nonfinite_ok
        # Left to the `nonfinite` rule of this metric: one event, one alert (rule-language 5.3).
        if not finite and self.excused:
            self.excused_count += 1
            return NOTHING
        self.n += 1
        self.last_step = step
        self.value = value
        self.score = score
        self.normal = normal
        if finite and score is None:
            return self._change(_WARMING) if self.state is _NO_DATA else NOTHING
        # A resume may lay a new warm-up over an open episode: that neither ends nor begins another by it.
        if self.warming and not self._warm(step, now):
            return NOTHING if self.state is _FIRING else self._change(_WARMING)
        direction = self.direction
        nearer: float | None = None
        if score is None:  # NaN or infinity: a breach of every numeric rule
            result = self._breach(now)
        else:
            closest = self.closest
            # A direction says all: the comparator need not be asked.
            if closest is None or (
                (score > closest if direction > 0 else score < closest)
                if direction
                else self.breaches.closer(score, closest)
            ):
                self.closest = nearer = score
                self.closest_step = step
            low, high = self.healthy.low, self.healthy.high
            if was_ok and low <= score <= high:
                result = NOTHING
            elif (score < low or score > high) if self.test is None else self.test(score):
                result = self._breach(now)
            else:
                result = self._healthy(now)
        if was_ok is not (self.state is _OK):
            self.find_quiet()
        elif nearer is not None and was_ok:
            # A value that rises comes here at each step: what `find_quiet` would find is written out for it.
            if not direction or self.quiet is EMPTY or self.scorer.memoryless:
                self.find_quiet()
            elif direction > 0:
                self.quiet.high = nearer
            else:
                self.quiet.low = nearer
        return result

    def judge_silence(self, silence: float, step: int, now: float) -> int:
        """Judge how long nothing has come (``missing``, ``stale``)."""
        ((score, self.normal),) = self.update((silence,), (step,), EMPTY)
        self.score = self.value = score = 0.0 if score is None else score
        if self.closest is None or self.breaches.closer(score, self.closest):
            self.closest, self.closest_step = score, step
        if self.breaches(score):
            return self._breach(now)
        return NOTHING if self.state is _OK else self._healthy(now)

    def its_turn(self, step: int) -> bool:
        """Whether a value of this step is judged: with ``every`` one of each bucket, and none that comes late."""
        if self.every == 1:
            return True
        bucket = step // self.every
        if bucket <= self.bucket:
            return False
        self.bucket = bucket
        return True

    def find_quiet(self) -> None:
        """Find the scores that would change nothing: no breach, and no closer approach than there was.

        A state of OK says that the warm-up is over and that no breach is remembered.
        """
        self.idle_from, self.idle_to = EMPTY.low, EMPTY.high
        closest = self.closest
        if self.state is not _OK or closest is None or self.every_score:
            self.quiet = EMPTY
            return
        quiet = self.breaches.quiet(closest)
        self.quiet = Bound(quiet.low, quiet.high)  # an own one: `judge` moves it
        if self.scorer.memoryless:
            idle = self.scorer.bound(self.quiet)
            if idle is not None:
                self.idle_from, self.idle_to = self._limits(idle)

    def bound(self, step: int) -> Bound | None:
        """What a value of this step must keep so that it does not breach; None if it would not be judged.

        For rules whose warm-up counts steps.
        """
        # The same questions as `its_turn` and `_warm` ask, without changing anything.
        if self.every > 1 and step // self.every <= self.bucket:
            return None
        if self.warming and (step <= self.warm_until or self.n + 1 < self.cause.min_samples):
            return None
        bound = self.scorer.bound(self.healthy)
        if bound is None and not self.nonfinite_ok:
            return FINITE  # a number could not be scored yet; what is none breaches all the same
        return None if bound is None else Bound(*self._limits(bound))

    def _limits(self, bound: Bound) -> tuple[float, float]:
        """The least and the greatest value: infinity breaches every numeric rule, whatever its comparator says."""
        low, high = bound.low, bound.high
        if self.nonfinite_ok:
            return low, high
        return low if low > _LEAST else _LEAST, high if high < _MOST else _MOST

    def _warm(self, step: int, now: float) -> bool:
        """Whether the warm-up is over; once it is, it is not asked again."""
        warmup = self.cause.warmup
        if warmup.unit == "samples":
            warm = self.n > warmup.amount
        elif warmup.unit == "seconds":
            if self.first_time is None:
                self.first_time = now
            warm = now - self.first_time >= warmup.amount
        else:
            warm = step > self.warm_until
        if warm and self.n >= self.cause.min_samples:
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
            self.breached_since += 1
            if self.breached_since == self.cause.error_after:
                return WORSE
            return NOTHING if self.cause.cooldown is None else AGAIN
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
            self.breached_since = 0
            return FIRED
        return self._change(_PENDING)

    def _healthy(self, now: float) -> int:
        self.streak = 0
        self.since = None
        # Before the first breach nothing is remembered, so that a healthy series costs no work here.
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
            enough = self.clear_streak >= self.need * self._patience()
        if not enough:
            return NOTHING
        self._change(_OK)
        self.clear_streak = 0
        self.clear_since = None
        if self.recent is not None:
            self.recent.clear()
            self.hits = 0
        return CLEARED

    def _patience(self) -> int:
        """How many times ``for`` it must be healthy: from the third time on, four times as long each time.

        A curve that flips around its threshold is one story, not a block for each turn.
        """
        return PATIENCE ** min(self.episodes - 2, PATIENT) if self.episodes > 2 and self.flips else 1

    def _remember(self, recent: deque[bool], breach: bool) -> None:
        if len(recent) == recent.maxlen:
            self.hits -= recent[0]
        recent.append(breach)
        self.hits += breach

    def rest(self, step: int) -> None:
        """Warm up anew from a step on. What the scorer has learnt stays; breaches so far are forgotten."""
        warmup = self.cause.warmup
        self.warming = True
        self.warm_until = step + int(warmup.amount) if warmup.unit == "steps" else self.warm_until
        self.first_time = None
        self.state = State.NO_DATA if self.state is State.NO_DATA else State.WARMING
        self.streak = self.clear_streak = 0
        self.since = self.clear_since = None
        if self.recent is not None:
            self.recent.clear()
            self.hits = 0
        self.find_quiet()

    # -- resume -----------------------------------------------------------------------

    def save(self, now: float) -> dict[str, Any]:
        """Plain JSON values. The clock of a resumed run begins anew: points in time are saved as how long ago they were."""
        saved: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        for name in _TIMES:
            at = getattr(self, name)
            saved[name] = None if at is None else now - at
        saved["labels"] = [list(pair) for pair in self.labels]
        saved["state"] = self.state.value
        saved["recent"] = None if self.recent is None else list(self.recent)
        saved["scorer"] = self.scorer.state()
        saved["closest"] = encode_number(self.closest)
        return saved

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """The inverse of :meth:`save`, by the clock of this run."""
        for name in _COUNTS:
            setattr(self, name, saved[name] if name != "breached_since" else saved.get(name, 0))
        for name in _TIMES:
            setattr(self, name, None if saved[name] is None else now - saved[name])
        self.state = State(saved["state"])
        if self.recent is not None and saved["recent"] is not None:
            self.recent.extend(saved["recent"])
            self.hits = sum(self.recent)
        self.scorer.restore(saved["scorer"])
        self.closest = None if saved["closest"] is None else decode_number(saved["closest"])
        self.find_quiet()
