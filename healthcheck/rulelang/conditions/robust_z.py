"""``robust_z``: distance from the median in units of the MAD. The default detector of spikes.

Mean and standard deviation are carried away by the very spike that they should find; the median
and the MAD are not (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import copysign, exp, inf, log
from typing import Any

from healthcheck.protocols import Condition, ConditionType, Scorer
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
        window = self._window
        score = self._score(value) if len(window.ordered) >= self._min_samples else None
        if self._learning.plain:
            window.push(value)
        else:
            self._learn(value, score)
        return score

    def _score(self, value: float) -> float:
        # median and _scale, written out: this runs for every sample of every rule that looks for spikes
        window = self._window
        ordered = window.ordered
        n = len(ordered)
        half = n >> 1
        center = self.normal = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])
        if n != self._factor_n:
            self._factor_n, self._factor = n, widening_mad(n)
        scale = MAD_TO_SIGMA * window.mad(center)
        floor = FLOOR * (center if center > 0.0 else -center)
        if scale > floor:
            return (value - center) / (scale * self._factor)
        scale = self._scale(window, center, floor)
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
    """The same on logarithms, as long as the whole window and the value are positive.

    Keeps the logarithms sorted; minus infinity stands for a value that has none, and while there
    is one the plain values are judged, sorted afresh for each sample (slow, rare, exact).
    """

    __slots__ = ("_values",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._values: deque[float] = deque(maxlen=window)

    def update(self, value: float, step: int) -> float | None:
        score = self._score(value) if len(self._values) >= self._min_samples else None
        if self._learning.plain:
            self._push(value)
        else:
            self._learn(value, score)
        return score

    def _score(self, value: float) -> float:
        logs = self._window
        if value > 0.0 and logs.ordered[0] > -inf:
            center = logs.median()
            self.normal = exp(center)
            return (log(value) - center) / self._scale(logs, center, FLOOR)
        plain = self._plain()
        center = self.normal = plain.median()
        scale = self._scale(plain, center, FLOOR * abs(center))
        away = value - center
        return away / scale if scale > 0.0 else (copysign(inf, away) if away else 0.0)

    def _plain(self) -> SortedWindow:
        window = SortedWindow(self._window.size)
        window.fill(self._values)
        return window

    def _push(self, value: float) -> None:
        self._values.append(value)
        self._window.push(log(value) if value > 0.0 else -inf)

    def _fill(self, values: list[float]) -> None:
        self._values.clear()
        self._values.extend(values)
        self._window.fill(log(v) if v > 0.0 else -inf for v in self._values)

    def value_at(self, score: float) -> float:
        logs = self._window
        if logs.ordered[0] > -inf:
            center = logs.median()
            try:
                return exp(center + score * self._scale(logs, center, FLOOR))
            except OverflowError:
                return inf
        plain = self._plain()
        center = plain.median()
        return center + score * self._scale(plain, center, FLOOR * abs(center))

    def state(self) -> Any:
        return {"window": list(self._values), "streak": self._streak[:]}


class RatioFloor:
    """Holds a breach back while the value is within ``min_ratio`` times the median.

    However quiet a window is, a change of a few percent is no spike. The score of such a value is
    cut to the share of the way to ``min_ratio``, so that it stays below the threshold and the
    closest approach stays meaningful. Only while value and median are positive: otherwise a ratio
    means nothing, and the score stands.
    """

    __slots__ = ("_breaches", "_inner", "_log_ratio", "normal")

    def __init__(self, inner: RobustZ, breaches: Bound, min_ratio: float) -> None:
        self._inner = inner
        self._breaches = breaches
        self._log_ratio = log(min_ratio)
        self.normal: float | None = None

    def update(self, value: float, step: int) -> float | None:
        score = self._inner.update(value, step)
        normal = self.normal = self._inner.normal
        if score is None or not self._breaches(score):
            return score
        if normal is None or normal <= 0.0 or value <= 0.0:
            return score
        share = abs(log(value / normal)) / self._log_ratio
        if share >= 1.0:
            return score
        limit = self._breaches.high if score > 0.0 else self._breaches.low
        return share * limit if limit is not None else 0.0

    def value_at(self, score: float) -> float:
        """The value from which on this score counts as a breach."""
        value, normal = self._inner.value_at(score), self._inner.normal
        if normal is None or normal <= 0.0 or value <= 0.0:
            return value
        return max(value, normal * exp(self._log_ratio)) if score > 0.0 else min(value, normal * exp(-self._log_ratio))

    def state(self) -> Any:
        return self._inner.state()

    def restore(self, state: Any) -> None:
        self._inner.restore(state)


def compile_robust_z(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "robust_z")
    window = sample_count(options, "window", 200, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="include", window=window)
    use_log, min_ratio = bool(options.get("log", False)), float(options.get("min_ratio", 1.0))

    def make() -> Scorer:
        inner = (RobustZOfLog if use_log else RobustZ)(window, min_samples, learning)
        return RatioFloor(inner, breaches, min_ratio) if min_ratio > 1.0 else inner

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
