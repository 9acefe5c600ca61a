"""``robust_z``: distance from the median in units of the MAD. The default detector of spikes.

Mean and standard deviation are carried away by the very spike that they should find; the median
and the MAD are not (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import copysign, exp, inf, log
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.comparators import Bound
from healthcheck.rulelang.conditions.base import (
    Compiled,
    flag_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.smallsample import widening_mad
from healthcheck.rulelang.conditions.windows import MAD_TO_SIGMA, SortedWindow

FLOOR = 0.001
"""The scale is at least this share of the median."""
MEAN_DEVIATION_TO_SIGMA = 1.2533
"""For windows in which more than half of the values are equal: Iglewicz and Hoaglin's fallback."""


class RobustZ:
    """(x - median) / (1.4826 MAD) over the samples before x."""

    __slots__ = ("_factor", "_factor_n", "_learning", "_min_samples", "_streak", "_window", "normal")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window)
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []
        self._factor_n, self._factor = 0, 1.0

    def update(self, value: float, step: int) -> float | None:
        score = self._score(value) if len(self._window.ordered) >= self._min_samples else None
        if self._learning.plain:
            self._window.push(value)
        else:
            self._learn(value, score)
        return score

    def _score(self, value: float) -> float:
        window = self._window
        center = self.normal = window.median()
        scale = self._scale(window, center, FLOOR * (center if center > 0.0 else -center))
        away = value - center
        return away / scale if scale > 0.0 else (copysign(inf, away) if away else 0.0)

    def _scale(self, window: SortedWindow, center: float, floor: float) -> float:
        n = len(window.ordered)
        if n != self._factor_n:
            self._factor_n, self._factor = n, widening_mad(n)
        scale = MAD_TO_SIGMA * window.mad(center)
        if scale < floor:
            scale = floor
        if scale == 0.0:
            scale = MEAN_DEVIATION_TO_SIGMA * sum(abs(v - center) for v in window.ordered) / n
        return scale * self._factor

    def _learn(self, value: float, score: float | None) -> None:
        learnt, level = self._learning.admit(value, score, self._streak, self.value_at)
        if level is not None:
            self._fill(level)
        elif learnt is not None:
            self._push(learnt)

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: list[float]) -> None:
        self._window.fill(values)

    def value_at(self, score: float) -> float:
        """The value that would have this score now."""
        center = self._window.median()
        return center + score * self._scale(self._window, center, FLOOR * abs(center))

    def state(self) -> Any:
        return {"window": list(self._window.values), "streak": self._streak[:]}

    def restore(self, state: Any) -> None:
        self._fill(state["window"])
        self._streak = list(state["streak"])


class RobustZOfLog(RobustZ):
    """The same on logarithms wherever the whole window and the value are positive.

    Also holds the ratio floor: while all is positive, a value nearer to the median than
    ``min_ratio`` times cannot breach, however quiet the window is; its score is shrunk in
    proportion, so that the closest approach stays meaningful.
    """

    __slots__ = ("_breaches", "_log", "_logs", "_min_ratio")

    def __init__(
        self, window: int, min_samples: int, learning: Learning, *, log: bool, min_ratio: float, breaches: Bound
    ) -> None:
        super().__init__(window, min_samples, learning)
        self._log = log
        self._min_ratio = min_ratio
        self._breaches = breaches
        self._logs = SortedWindow(window)
        """Logarithms of the window; minus infinity stands for a value that has none."""

    def update(self, value: float, step: int) -> float | None:
        score = self._score(value) if len(self._window.ordered) >= self._min_samples else None
        if self._learning.plain:
            self._push(value)
        else:
            self._learn(value, score)
        return score

    def _positive(self) -> bool:
        return self._window.ordered[0] > 0.0

    def _score(self, value: float) -> float:
        if value <= 0.0 or not self._positive():
            return super()._score(value)
        if self._log:
            center = self._logs.median()
            self.normal = exp(center)
            score = (log(value) - center) / self._scale(self._logs, center, FLOOR)
        else:
            score = super()._score(value)
        return self._floored(score, value) if self._min_ratio > 1.0 else score

    def _floored(self, score: float, value: float) -> float:
        assert self.normal is not None
        share = abs(log(value) - log(self.normal)) / log(self._min_ratio)
        if share >= 1.0:
            return score
        high, low = self._breaches.high, self._breaches.low
        if high is not None and high > 0.0 and score > share * high:
            return share * high
        if low is not None and low < 0.0 and score < share * low:
            return share * low
        return score

    def _push(self, value: float) -> None:
        self._window.push(value)
        self._logs.push(log(value) if value > 0.0 else -inf)

    def _fill(self, values: list[float]) -> None:
        self._window.fill(values)
        self._logs.fill(log(v) if v > 0.0 else -inf for v in values)

    def value_at(self, score: float) -> float:
        if self._log and self._positive():
            center = self._logs.median()
            try:
                return exp(center + score * self._scale(self._logs, center, FLOOR))
            except OverflowError:
                return inf
        return super().value_at(score)


def compile_robust_z(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "robust_z")
    window = sample_count(options, "window", 200, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="include", window=window)
    use_log, min_ratio = bool(options.get("log", False)), float(options.get("min_ratio", 1.0))

    def make() -> RobustZ:
        if use_log or min_ratio > 1.0:
            return RobustZOfLog(window, min_samples, learning, log=use_log, min_ratio=min_ratio, breaches=breaches)
        return RobustZ(window, min_samples, learning)

    return Compiled(
        "robust_z",
        breaches,
        make,
        "{series} {value} is {score:.1f} robust sigmas from its recent median {normal}",
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


ROBUST_Z = ConditionType(
    "robust_z",
    options_schema(
        "(x - median) / (1.4826 MAD) of the window before x; the scale is at least 0.1 % of the median.",
        window=window_schema(),
        log=flag_schema("Judge logarithms while the whole window is positive: for losses that fall by factors."),
        min_ratio=number_schema(
            "While all is positive, only a value at least this many times above or below the median can breach (1).",
            minimum=1,
        ),
    ),
    compile_robust_z,
    help="Distance from the median of the window before the sample, in MADs scaled to sigmas.",
)
