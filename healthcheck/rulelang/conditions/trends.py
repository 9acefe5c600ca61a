"""Conditions on where a value is heading: ``slope`` over a window, and ``drift`` away from what was usual.

**slope.** Without ``confidence`` the score is the least-squares slope. With it, the score is the end of the
slope's confidence interval that is nearer to doubt, so that ``above: 0`` with ``confidence: 0.95``
reads "rising, with 95 % confidence": the Theil-Sen slope with Sen's interval (Theil 1950; Sen, "Estimates of the
regression coefficient based on Kendall's tau", 1968; variance with ties: Mann 1945, Kendall 1975).

Loss curves are noisy and neighbours resemble each other, which makes every trend test too sure of
itself. So the window is first cut into at most ``BLOCKS`` blocks of equal length. The score is
renewed when a block is complete and stands in between.

**drift.** A lasting change of level or a slow divergence, too small to be a spike. The Page-Hinkley test (Page,
"Continuous inspection schemes", 1954; Hinkley, "Inference about the change-point from cumulative sum tests", 1971):
what is left of each value after subtracting the usual level and a slack is added up, never below zero, and the sum
is the score. Values are first standardised by the median and MAD of a window before them and cut at ``CLIP``, so
that the sum measures persistence and one spike cannot raise the alarm alone. The baseline lags ``lag`` samples
behind: a slow ramp must not be learnt before it is judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import NormalDist
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored, Scorer
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    OptionError,
    UnboundedScorer,
    choice_schema,
    flag_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import MAD_TO_SIGMA, SortedWindow, widening_mad

BLOCKS = 32
FLOOR = 0.001
"""The scale of ``drift`` is at least this share of the level."""
CLIP = 4.0
"""Sigmas at which one value is cut before it is added up."""

# --------------------------------------------------------------------------- slope


class Slope(UnboundedScorer):
    """Least-squares slope of the window, over sample numbers or over steps, in constant time.

    Sums are kept relative to a point near the data and taken afresh once per window, so that
    rounding errors neither cancel nor pile up.
    """

    __slots__ = ("_count", "_min_samples", "_origin", "_over", "_points", "_relative", "_steps", "_sums", "normal")

    def __init__(self, over: int, min_samples: int, *, relative: bool, steps: bool) -> None:
        self.normal: float | None = None
        self._points: deque[tuple[int, float]] = deque(maxlen=over)
        self._over = over
        self._min_samples = min_samples
        self._relative = relative
        self._steps = steps
        self._count = 0
        self._origin = (0, 0.0)
        self._sums = (0.0, 0.0, 0.0, 0.0)
        """Sums of x, y, x * x and x * y, from the origin."""

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        points, over = self._points, self._over
        at = 0
        found: Found = ()
        for value in values:
            place = count = self._count = self._count + 1
            if self._steps:
                place = steps[at]
                at += 1
            n = len(points)
            full = n == over
            if full:
                old_place, old_value = points[0]
            else:
                n += 1
            points.append((place, value))
            if n == 1 or count % over == 0:
                self._refresh()
                sum_x, sum_y, sum_xx, sum_xy = self._sums
            else:
                origin, level = self._origin
                sum_x, sum_y, sum_xx, sum_xy = self._sums
                x, y = place - origin, value - level
                sum_x, sum_y, sum_xx, sum_xy = sum_x + x, sum_y + y, sum_xx + x * x, sum_xy + x * y
                if full:
                    x, y = old_place - origin, old_value - level
                    sum_x, sum_y, sum_xx, sum_xy = sum_x - x, sum_y - y, sum_xx - x * x, sum_xy - x * y
                self._sums = (sum_x, sum_y, sum_xx, sum_xy)
            score: float | None = None
            spread = sum_xx - sum_x * sum_x / n
            if n >= self._min_samples and spread > 0.0:
                self.normal = points[0][1]
                score = (sum_xy - sum_x * sum_y / n) / spread
                if self._relative:
                    score = _relative_to(score, self._origin[1] + sum_y / n)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def _refresh(self) -> None:
        points = self._points
        # From the newest place and the mean value: x and y stay small however far a run has come.
        at, level = points[-1][0], sum([v for _, v in points]) / len(points)
        self._origin = (at, level)
        xs, ys = [x - at for x, _ in points], [v - level for _, v in points]
        self._sums = (
            float(sum(xs)),
            sum(ys),
            float(sum([x * x for x in xs])),
            sum([x * y for x, y in zip(xs, ys, strict=True)]),
        )

    def state(self) -> Any:
        return [[list(p) for p in self._points], self._count, list(self._origin), list(self._sums), self.normal]

    def restore(self, state: Any) -> None:
        points, self._count, (at, level), sums, self.normal = state
        self._points.clear()
        self._points.extend((int(x), float(v)) for x, v in points)
        self._origin = (int(at), float(level))
        self._sums = (float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3]))


class SureSlope(UnboundedScorer):
    """The cautious end of the Theil-Sen interval over block medians.

    ``learn`` takes a value without judging it. The score is renewed when a block is complete.
    """

    __slots__ = (
        "_judged",
        "_learns",
        "_memory",
        "_min_blocks",
        "_relative",
        "_score",
        "_shape",
        "_sides",
        "_z",
        "normal",
    )

    def __init__(
        self, over: int, min_samples: int, *, confidence: float, sides: str, relative: bool, steps: bool
    ) -> None:
        self.normal: float | None = None
        block = max(1, over // BLOCKS)
        self._shape = (over, steps)
        self._memory = BlockSlopes(block, over // block, steps=steps)
        self._learns = True
        """Whether this scorer feeds the memory; one that has joined another leaves it to that."""
        self._min_blocks = max(4, -(-min_samples // block))
        self._z = NormalDist().inv_cdf(confidence)
        self._sides = sides
        self._relative = relative
        self._judged = 0
        self._score: float | None = None

    def join(self, other: Any) -> SureSlope | None:
        """Several slopes over one window, such as ``above`` and ``below``, share their blocks."""
        if not isinstance(other, SureSlope) or other._shape != self._shape:
            return None
        self._memory, self._learns = other._memory, False
        return self

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        memory = self._memory
        found: Found = ()
        at = 0
        for value in values:
            if self._learns:
                memory.take(value, steps[at])
            at += 1  # noqa: SIM113 - `enumerate` costs more for a run of one
            if memory.count != self._judged and memory.count >= self._min_blocks:
                self._judged = memory.count
                self._score = self._judge()
            score = self._score
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def learn(self, values: Sequence[float], steps: Sequence[int]) -> int:
        """Take values without judging them; returns how many came before there were enough to judge."""
        memory = self._memory
        if self._learns:
            return memory.learn(values, steps, self._min_blocks)
        return len(values) if memory.count < self._min_blocks else 0

    def _judge(self) -> float | None:
        memory = self._memory
        bounds = memory.interval(self._z)  # shared by parts with the same confidence
        levels = memory.levels()
        self.normal = levels[0]
        if bounds is None:
            return None
        low, high = bounds
        if self._sides == "low":
            slope = low
        elif self._sides == "high":
            slope = high
        else:  # outside: nothing is certain while the interval holds zero
            slope = low if low > 0.0 else (high if high < 0.0 else 0.0)
        if not isfinite(slope):
            return None  # too few blocks for this confidence
        return _relative_to(slope, sum(levels) / len(levels)) if self._relative else slope

    def state(self) -> Any:
        return [self._memory.state(), self.normal] if self._learns else None

    def restore(self, state: Any) -> None:
        self._judged = 0  # judged again at the next value: from the same blocks the same score
        self._score = None
        if self._learns:
            memory, self.normal = state
            self._memory.restore(memory)


def _relative_to(slope: float, level: float) -> float | None:
    return slope / abs(level) if level else None


_REBUILD = 6
"""From so many new blocks on all slopes are taken afresh: cheaper than adding block by block."""


class BlockSlopes:
    """The newest blocks of a series, each represented by its median, and the slopes of all pairs of them, sorted.

    Blocks take out most of the autocorrelation, single spikes, and the quadratic cost.

    Values are only learnt until somebody asks: their blocks wait, and those that leave the window in
    the meantime cost nothing. A new block then adds one slope for each block in the window, and the
    oldest takes its own away.

    :param block: samples per block.
    :param most: blocks in the window.
    :param steps: take slopes over steps, not over sample numbers.
    """

    __slots__ = (
        "_asked", "_block", "_blocks", "_interval", "_levels", "_most", "_open", "_slopes", "_steps", "_steps_open",
        "_waiting", "count",
    )  # fmt: skip

    def __init__(self, block: int, most: int, *, steps: bool) -> None:
        self.count = 0
        """Blocks completed so far."""
        self._block = block
        self._most = most
        self._steps = steps
        self._open: list[float] = []
        self._steps_open = 0
        """Values of the block that is not complete, and the sum of their steps."""
        self._blocks: deque[tuple[float, float]] = deque()
        """(place on the axis that the slope is taken over, level)"""
        self._levels: list[float] = []
        """Those of the blocks, once they are asked for."""
        self._waiting: deque[tuple[float, float]] = deque(maxlen=most)
        self._slopes: list[float] = []
        self._asked: tuple[int, float] | None = None
        self._interval: tuple[float, float] | None = None

    def take(self, value: float, step: int) -> None:
        """Learn one value."""
        self._open.append(value)
        self._steps_open += step
        if len(self._open) == self._block:
            self._complete()

    def learn(self, values: Sequence[float], steps: Sequence[int], least: int) -> int:
        """Learn several; returns how many of them came before there were ``least`` blocks."""
        early = at = 0
        while at < len(values):
            end = at + self._block - len(self._open)
            part = values[at:end]
            self._open += part
            self._steps_open += sum(steps[at:end])
            at += len(part)
            if len(self._open) < self._block:
                return early + (len(part) if self.count < least else 0)
            before = self.count
            # `_complete` written out: blocks of few values are complete all the time.
            opened, block = self._open, self._block
            place = self._steps_open / block if self._steps else float(before * block)
            opened.sort()
            half = block >> 1
            self._waiting.append((place, opened[half] if block & 1 else (opened[half - 1] + opened[half]) / 2))
            opened.clear()
            self._steps_open = 0
            self.count = before + 1
            # The value that completes a block is judged with it.
            early += len(part) if self.count < least else (len(part) - 1 if before < least else 0)
        return early

    def _complete(self) -> None:
        """There are enough values for one more block."""
        values, block = self._open, self._block
        place = self._steps_open / block if self._steps else float(self.count * block)
        values.sort()
        half = block >> 1
        level = values[half] if block & 1 else (values[half - 1] + values[half]) / 2
        self._waiting.append((place, level))
        values.clear()
        self._steps_open = 0
        self.count += 1

    def levels(self) -> list[float]:
        """The levels of the blocks in the window, oldest first. Not to be changed."""
        if self._waiting:
            self._catch_up()
            self._levels = [level for _, level in self._blocks]
        return self._levels

    def interval(self, z: float) -> tuple[float, float] | None:
        """One-sided bounds of the slope; see :func:`theil_sen_interval`."""
        if self._asked != (self.count, z):
            levels = self.levels()
            self._asked = (self.count, z)
            self._interval = theil_sen_interval(self._slopes, levels, z)
        return self._interval

    def _catch_up(self) -> None:
        waiting, blocks = self._waiting, self._blocks
        if len(waiting) < _REBUILD:
            for place, level in waiting:
                self._add(place, level)
        else:
            blocks.extend(waiting)
            while len(blocks) > self._most:
                blocks.popleft()
            window = list(blocks)
            self._slopes = [
                (later - level) / (after - place)
                for at, (place, level) in enumerate(window)
                for after, later in window[at + 1 :]
                if after != place
            ]
            self._slopes.sort()
        waiting.clear()

    def _add(self, place: float, level: float) -> None:
        blocks, slopes = self._blocks, self._slopes
        if len(blocks) == self._most:
            x, y = blocks.popleft()
            for after, later in blocks:
                if after != x:
                    del slopes[bisect_left(slopes, (later - y) / (after - x))]
        slopes += [(level - y) / (place - x) for x, y in blocks if place != x]
        slopes.sort()  # two sorted runs and a few stragglers: far from a full sort
        blocks.append((place, level))

    def state(self) -> Any:
        blocks = [*self._blocks, *self._waiting][-self._most :]
        return [[list(b) for b in blocks], self._open[:], self._steps_open, self.count]

    def restore(self, state: Any) -> None:
        blocks, pending, steps, count = state
        self.count = int(count)
        self._open = [float(v) for v in pending]
        self._steps_open = int(steps)
        self._blocks.clear()
        self._slopes, self._levels = [], []
        self._asked = None
        self._waiting.clear()
        self._waiting.extend((float(place), float(level)) for place, level in blocks)


def theil_sen_interval(slopes: Sequence[float], ys: Sequence[float], z: float) -> tuple[float, float] | None:
    """One-sided bounds of the Theil-Sen slope, each at the confidence that ``z`` stands for.

    None when no two points differ in x. Ties in y reduce the variance of Kendall's S.

    :param slopes: of all pairs of points that differ in x, sorted.
    """
    if not slopes:
        return None
    n = len(ys)
    ties: dict[float, int] = {}
    if len(set(ys)) < n:
        for y in ys:
            ties[y] = ties.get(y, 0) + 1
    variance = (n * (n - 1) * (2 * n + 5) - sum([t * (t - 1) * (2 * t + 5) for t in ties.values()])) / 18
    half = z * sqrt(max(variance, 0.0))
    count = len(slopes)
    low = int((count - half) / 2)
    high = int((count + half) / 2 + 1)
    return (slopes[max(low - 1, 0)] if low > 0 else float("-inf"), slopes[high - 1] if high <= count else float("inf"))


# --------------------------------------------------------------------------- drift


class Drift(UnboundedScorer):
    """Score: the Page-Hinkley sum, in sigmas."""

    __slots__ = ("_cap", "_lag", "_min_samples", "_sign", "_slack", "_sum", "_waiting", "_window", "normal")

    def __init__(self, window: int, min_samples: int, *, lag: int, slack: float, sign: float, cap: float) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window, with_mad=True)
        self._waiting: deque[float] = deque()
        self._min_samples = min_samples
        self._lag = lag
        self._slack = slack
        self._sign = sign
        self._cap = cap
        self._sum = 0.0

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        window, waiting = self._window, self._waiting
        found: Found = ()
        for value in values:
            score: float | None = None
            n = len(window)
            if n >= self._min_samples:
                center = self.normal = window.median
                scale = max(MAD_TO_SIGMA * window.mad, FLOOR * abs(center)) * widening_mad(n)
                away = self._sign * (value - center)
                if scale > 0.0:
                    z = max(-CLIP, min(CLIP, away / scale))
                else:
                    z = CLIP if away > 0.0 else -CLIP if away else 0.0
                # Capped, so that a rule can clear in bounded time after the level is normal again.
                score = self._sum = min(max(0.0, self._sum + z - self._slack), self._cap)
            waiting.append(value)
            if len(waiting) > self._lag:
                window.push(waiting.popleft())
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def state(self) -> Any:
        return [list(self._window.values), list(self._waiting), self._sum, self.normal]

    def restore(self, state: Any) -> None:
        self._window.fill(state[0])
        self._waiting = deque(state[1])
        self._sum, self.normal = float(state[2]), state[3]


# --------------------------------------------------------------------------- their compilers


def compile_slope(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "slope")
    over = sample_count(options, "over", 100, least=2)
    min_samples = max(2, min_samples_of(rule, over))
    relative, steps = bool(options.get("relative", False)), options.get("per", "sample") == "step"
    confidence = options.get("confidence")
    sides = {0: "both", 1: "low", -1: "high"}[breaches.direction]

    def make() -> Scorer:
        if confidence is None:
            return Slope(over, min_samples, relative=relative, steps=steps)
        return SureSlope(over, min_samples, confidence=float(confidence), sides=sides, relative=relative, steps=steps)

    unit = "step" if steps else "sample"
    rate = "{score:.3%}" if relative else "{score:.4g}"
    sure = f" with {float(confidence):.0%} confidence" if confidence is not None else ""
    return CompiledCondition(
        "slope",
        breaches,
        make,
        f"{{series}} changes by {rate} a {unit} over {over} samples, {{threshold}}{sure}",
        min_samples=min_samples,
        window=over,
    )


def compile_drift(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "drift")
    if breaches.direction <= 0 or breaches.high is None or breaches.high <= 0:
        raise OptionError("the drift score is a sum that grows from zero; compare it with `above: ...`, such as 25")
    window = sample_count(options, "window", 100, least=4)
    lag = sample_count(options, "lag", max(1, window // 4), least=0)
    min_samples = max(4, min_samples_of(rule, window))
    slack = float(options.get("slack", 1.0))
    sign = 1.0 if options.get("direction", "up") == "up" else -1.0
    cap = 2.0 * breaches.high
    return CompiledCondition(
        "drift",
        breaches,
        lambda: Drift(window, min_samples, lag=lag, slack=slack, sign=sign, cap=cap),
        f"{{series}} {{value}} drifts {'up' if sign > 0 else 'down'} from {{normal}}: accumulated {{score:.1f}} sigmas, {{threshold}}",
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


SLOPE = ConditionType(
    "slope",
    options_schema(
        "Least-squares slope per sample over `over` samples.",
        over=window_schema("Samples in the window, at most; it judges from `min_samples` on."),
        confidence=number_schema(
            "Compare the cautious end of the Theil-Sen interval instead: `above: 0` is then a rise that is sure.",
            exclusiveMinimum=0.5,
            exclusiveMaximum=1,
        ),
        relative=flag_schema("Divide the slope by the size of the window's mean: 0.01 is 1 % a sample."),
        per=choice_schema("Slope per `sample` (default) or per `step`.", "sample", "step"),
    ),
    compile_slope,
    help="Slope of the window per sample; with `confidence`, only what is sure.",
)

DRIFT = ConditionType(
    "drift",
    options_schema(
        "Page-Hinkley sum of robustly standardised values: slow divergence and lasting changes of level.",
        window=window_schema("Samples of the baseline, at most.", least=4),
        lag=window_schema("How many samples the baseline stays behind the value (a quarter of the window).", least=0),
        slack=number_schema(
            "Sigmas that are subtracted from every value: drifts smaller than this are accepted (1).", minimum=0
        ),
        direction=choice_schema("`up` (default) or `down`.", "up", "down"),
    ),
    compile_drift,
    help="A lasting change of level, or slow divergence.",
)
