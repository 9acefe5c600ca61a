"""``slope``: how fast a value rises or falls per sample.

Without ``confidence`` the score is the least-squares slope. With it, the score is the end of the
slope's confidence interval that is nearer to doubt, so that ``above: 0`` with ``confidence: 0.95``
reads "rising, with 95 % confidence": the Theil-Sen slope with Sen's interval, see ``theilsen.py``.

Loss curves are noisy and neighbours resemble each other, which makes every trend test too sure of
itself. So the window is first cut into at most ``BLOCKS`` blocks of equal length. The score is
renewed when a block is complete and stands in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import NormalDist
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
from healthcheck.rulelang.conditions.theilsen import BlockSlopes

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
        count = self._count = self._count + 1
        place = step if self._steps else count
        full = len(points) == points.maxlen
        old = points[0] if full else (0, 0.0)
        points.append((place, value))
        n = len(points)
        if n == 1 or count % (points.maxlen or 1) == 0:
            self._refresh()
            sum_x, sum_y, sum_xx, sum_xy = self._sums
        else:
            at, level = self._origin
            sum_x, sum_y, sum_xx, sum_xy = self._sums
            x, y = place - at, value - level
            sum_x, sum_y, sum_xx, sum_xy = sum_x + x, sum_y + y, sum_xx + x * x, sum_xy + x * y
            if full:
                x, y = old[0] - at, old[1] - level
                sum_x, sum_y, sum_xx, sum_xy = sum_x - x, sum_y - y, sum_xx - x * x, sum_xy - x * y
            self._sums = (sum_x, sum_y, sum_xx, sum_xy)
        if n < self._min_samples:
            return None
        spread = sum_xx - sum_x * sum_x / n
        if spread <= 0.0:
            return None
        self.normal = points[0][1]
        slope = (sum_xy - sum_x * sum_y / n) / spread
        return _relative_to(slope, self._origin[1] + sum_y / n) if self._relative else slope

    def _refresh(self) -> None:
        points = self._points
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
        return [[list(p) for p in self._points], self._count, list(self._origin), list(self._sums)]

    def restore(self, state: Any) -> None:
        points, self._count, (at, level), sums = state
        self._points.clear()
        self._points.extend((int(x), float(v)) for x, v in points)
        self._origin = (int(at), float(level))
        self._sums = (float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3]))


class SureSlope:
    """The cautious end of the Theil-Sen interval over block medians.

    ``learn`` takes a value without judging it. The score is renewed when a block is complete.
    """

    __slots__ = (
        "_judged", "_learns", "_memory", "_min_blocks", "_relative", "_score", "_shape", "_sides", "_z", "normal",
    )  # fmt: skip

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

    def update(self, value: float, step: int) -> float | None:
        memory = self._memory
        if self._learns:
            memory.take(value, step)
        if memory.count != self._judged and memory.count >= self._min_blocks:
            self._judged = memory.count
            self._score = self._judge()
        return self._score

    def learn(self, value: float, step: int) -> bool:
        """Take a value; returns whether there are enough of them to judge."""
        if self._learns:
            self._memory.take(value, step)
        return self._memory.count >= self._min_blocks

    def _judge(self) -> float | None:
        memory = self._memory
        bounds = memory.interval(self._z)
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
        return self._memory.state() if self._learns else None

    def restore(self, state: Any) -> None:
        self._judged = 0  # judged again at the next value: from the same blocks the same score
        self._score = None
        if self._learns:
            self._memory.restore(state)


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
