"""``slope``: how fast a value rises or falls per sample.

Without ``confidence`` the score is the least-squares slope. With it, the score is the end of the
slope's confidence interval that is nearer to doubt, so that ``above: 0`` with ``confidence: 0.95``
reads "rising, with 95 % confidence": the Theil-Sen slope with Sen's interval (Theil 1950; Sen,
"Estimates of the regression coefficient based on Kendall's tau", 1968; variance with ties: Mann
1945, Kendall 1975).

Loss curves are noisy and neighbours resemble each other, which makes every trend test too sure of
itself. So the window is first cut into at most ``BLOCKS`` blocks of equal length and each block
is represented by its median: that takes out most of the autocorrelation, single spikes, and the
quadratic cost. The score is renewed when a block is complete and stands in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from statistics import NormalDist, median
from typing import Any

from healthcheck.protocols import Condition, ConditionType, Scorer
from healthcheck.rulelang.conditions.base import (
    Compiled,
    choice_schema,
    flag_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)

BLOCKS = 32


class Slope:
    """Least-squares slope of the window, over sample numbers or over steps, in constant time.

    Sums are kept relative to a point near the data and taken afresh once per window, so that
    rounding errors neither cancel nor pile up.
    """

    __slots__ = ("_count", "_min_samples", "_origin", "_points", "_relative", "_steps", "_sums", "normal")

    def __init__(self, over: int, min_samples: int, *, relative: bool, steps: bool) -> None:
        self.normal: float | None = None
        self._points: deque[tuple[int, float]] = deque(maxlen=over)
        self._min_samples = min_samples
        self._relative = relative
        self._steps = steps
        self._count = 0
        self._origin = (0, 0.0)
        self._sums = (0.0, 0.0, 0.0, 0.0)
        """Sums of x, y, x * x and x * y, from the origin."""

    def update(self, value: float, step: int) -> float | None:
        points = self._points
        self._count += 1
        old = points[0] if len(points) == points.maxlen else None
        new = (step if self._steps else self._count, value)
        points.append(new)
        if self._count % (points.maxlen or 1) == 0 or len(points) == 1:
            self._refresh()
        else:
            self._slide(new, old)
        n = len(points)
        if n < self._min_samples:
            return None
        sum_x, sum_y, sum_xx, sum_xy = self._sums
        spread = sum_xx - sum_x * sum_x / n
        if spread <= 0.0:
            return None
        self.normal = points[0][1]
        slope = (sum_xy - sum_x * sum_y / n) / spread
        return _relative_to(slope, self._origin[1] + sum_y / n) if self._relative else slope

    def _slide(self, new: tuple[int, float], old: tuple[int, float] | None) -> None:
        at, level = self._origin
        x, y = new[0] - at, new[1] - level
        sum_x, sum_y, sum_xx, sum_xy = self._sums
        sum_x, sum_y, sum_xx, sum_xy = sum_x + x, sum_y + y, sum_xx + x * x, sum_xy + x * y
        if old is not None:
            x, y = old[0] - at, old[1] - level
            sum_x, sum_y, sum_xx, sum_xy = sum_x - x, sum_y - y, sum_xx - x * x, sum_xy - x * y
        self._sums = (sum_x, sum_y, sum_xx, sum_xy)

    def _refresh(self) -> None:
        points = self._points
        at, level = points[-1][0], sum(v for _, v in points) / len(points)
        self._origin = (at, level)
        xs, ys = [x - at for x, _ in points], [v - level for _, v in points]
        self._sums = (
            float(sum(xs)),
            sum(ys),
            float(sum(x * x for x in xs)),
            sum(x * y for x, y in zip(xs, ys, strict=True)),
        )

    def state(self) -> Any:
        return [[list(p) for p in self._points], self._count, list(self._origin), list(self._sums)]

    def restore(self, state: Any) -> None:
        points, self._count, (at, level), sums = state
        self._points.clear()
        self._points.extend((int(x), float(v)) for x, v in points)
        self._origin = (int(at), float(level))
        self._sums = (float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3]))


class SureSlope:
    """The cautious end of the Theil-Sen interval over block medians.

    The slopes of all pairs of blocks are kept sorted: a new block adds one slope for each block in
    the window and the oldest takes its own away, so that a judgement costs no new sorting of all.
    ``learn`` takes a value without judging it: its block waits until the next judgement.
    """

    __slots__ = (
        "_block", "_blocks", "_count", "_min_blocks", "_most_blocks", "_open", "_places", "_relative", "_score", "_sides", "_slopes",
        "_steps", "_waiting", "_z", "normal",
    )  # fmt: skip

    def __init__(
        self, over: int, min_samples: int, *, confidence: float, sides: str, relative: bool, steps: bool
    ) -> None:
        self.normal: float | None = None
        self._block = max(1, over // BLOCKS)
        self._blocks: deque[tuple[float, float]] = deque()
        self._places: deque[float] = deque()
        """Where each block stands on the axis that the slope is taken over: steps, or samples."""
        self._count = 0
        self._slopes: list[float] = []
        self._open: list[tuple[int, float]] = []
        self._min_blocks = max(4, -(-min_samples // self._block))
        self._most_blocks = over // self._block
        self._z = NormalDist().inv_cdf(confidence)
        self._sides = sides
        self._relative = relative
        self._steps = steps
        self._score: float | None = None
        self._waiting: deque[tuple[float, float]] = deque(maxlen=self._most_blocks)
        """Blocks that were learnt and are not in the window yet."""

    def update(self, value: float, step: int) -> float | None:
        if self.learn(value, step) and self._waiting:
            self._catch_up()
            self._score = self._judge()
        return self._score

    def learn(self, value: float, step: int) -> bool:
        """Take a value; returns whether there are enough of them to judge."""
        self._open.append((step, value))
        if len(self._open) == self._block:
            at = sum(s for s, _ in self._open) / self._block
            self._waiting.append((at, median(v for _, v in self._open) if self._block > 1 else value))
            self._open = []
            self._count += 1
        return self._count >= self._min_blocks

    def _catch_up(self) -> None:
        first = self._count - len(self._waiting)
        if len(self._waiting) == self._most_blocks:  # nothing of the window is left
            self._blocks.clear()
            self._places.clear()
            self._slopes.clear()
        for number, (at, level) in enumerate(self._waiting, first):
            self._add(number, at, level)
        self._waiting.clear()

    def _add(self, number: int, at: float, level: float) -> None:
        blocks, places, slopes = self._blocks, self._places, self._slopes
        if len(blocks) == self._most_blocks:
            x, (_, y) = places.popleft(), blocks.popleft()
            for after, (_, later) in zip(places, blocks, strict=True):
                if after != x:
                    del slopes[bisect_left(slopes, (later - y) / (after - x))]
        place = at if self._steps else float(number * self._block)
        slopes += [(level - y) / (place - x) for x, (_, y) in zip(places, blocks, strict=True) if place != x]
        slopes.sort()  # two sorted runs and a few stragglers: far from a full sort
        blocks.append((at, level))
        places.append(place)

    def _judge(self) -> float | None:
        ys = [y for _, y in self._blocks]
        self.normal = ys[0]
        bounds = theil_sen_interval(self._slopes, ys, self._z)
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
        return _relative_to(slope, sum(ys) / len(ys)) if self._relative else slope

    def state(self) -> Any:
        blocks = [*self._blocks, *self._waiting][-self._most_blocks :]
        return [[list(b) for b in blocks], [list(p) for p in self._open], self._score, self._count, len(self._waiting)]

    def restore(self, state: Any) -> None:
        self._blocks.clear()
        self._places.clear()
        self._slopes.clear()
        blocks, pending, self._score, self._count, waiting = state
        first, known = self._count - len(blocks), max(0, len(blocks) - waiting)
        for number, (at, level) in enumerate(blocks[:known], first):
            self._add(number, float(at), float(level))
        self._waiting.clear()
        self._waiting.extend((float(at), float(level)) for at, level in blocks[known:])
        self._open = [(int(s), float(v)) for s, v in pending]


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
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties.values())) / 18
    half = z * sqrt(max(variance, 0.0))
    count = len(slopes)
    low = int((count - half) / 2)
    high = int((count + half) / 2 + 1)
    return (slopes[max(low - 1, 0)] if low > 0 else float("-inf"), slopes[high - 1] if high <= count else float("inf"))


def _relative_to(slope: float, level: float) -> float | None:
    return slope / abs(level) if level else None


def compile_slope(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "slope")
    over = sample_count(options, "over", 100, least=2)
    min_samples = max(2, min_samples_of(rule, over))
    relative, steps = bool(options.get("relative", False)), options.get("per", "sample") == "step"
    confidence = options.get("confidence")
    sides = "both" if breaches.kind in ("outside", "equals") else ("low" if breaches.high is not None else "high")

    def make() -> Scorer:
        if confidence is None:
            return Slope(over, min_samples, relative=relative, steps=steps)
        return SureSlope(over, min_samples, confidence=float(confidence), sides=sides, relative=relative, steps=steps)

    unit = "step" if steps else "sample"
    rate = "{score:.3%}" if relative else "{score:.4g}"
    sure = f" with {float(confidence):.0%} confidence" if confidence is not None else ""
    return Compiled(
        "slope",
        breaches,
        make,
        f"{{series}} changes by {rate} a {unit} over {over} samples, {{threshold}}{sure}",
        min_samples=min_samples,
        window=over,
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
