"""``robust_z``: distance from the median in units of the MAD. The default detector of spikes.

Mean and standard deviation are carried away by the very spike that they should find; the median
and the MAD are not (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from math import copysign, exp, inf, log, sqrt
from typing import Any

from healthcheck.protocols import Condition, ConditionType, Scorer
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
USUAL, FEW = 0.1, 3
"""Part of the older half of the window that makes a high value a usual one, and how many at least."""


class RobustZ:
    """(x - median) / (1.4826 MAD) over the samples before x.

    With a ``min_ratio`` a value that is less than so many times away from the median cannot breach: its
    score is then its share of that distance (in logarithms), as a share of the limit, so that it stays on the
    healthy side and the closest approach still tells how near it came. Where the median or the value is not
    positive a ratio means nothing, and the score stands. Nor can a value breach then if one in ten of the window's older
    half was at least half as far away: tasks that take turns, each with a level of its own, make no spikes. What grows
    has reached only the newer half.
    """

    __slots__ = (
        "_breaches",
        "_factor",
        "_factor_n",
        "_high",
        "_learning",
        "_log_ratio",
        "_low",
        "_min_samples",
        "_streak",
        "_window",
        "normal",
    )

    def __init__(self, window: int, min_samples: int, learning: Learning, min_ratio: float = 1.0) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window)
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []
        self._factor_n, self._factor = 0, 1.0
        self._breaches = learning.breaches
        self._low, self._high = learning.breaches.healthy
        self._log_ratio = log(min_ratio)

    def update(self, value: float, step: int) -> float | None:
        window = self._window
        score: float | None = None
        if len(window.ordered) >= self._min_samples:
            center, mad = window.center_and_mad()
            self.normal = center
            scale = MAD_TO_SIGMA * mad
            floor = FLOOR * (center if center > 0.0 else -center)
            if scale > floor and len(window.ordered) == self._factor_n:  # the usual case
                score = (value - center) / (scale * self._factor)
            else:
                score = self._score(window, value, center, mad, floor)
        if self._learning.plain:
            window.push(value)
        else:
            self._learn(value, score)
        if self._log_ratio and score is not None and not self._low <= score <= self._high:
            return self._far_enough(score, value)
        return score

    def _score(self, window: SortedWindow, value: float, center: float, mad: float, floor: float) -> float:
        scale = self._scale(window, center, mad, floor)
        away = value - center
        return away / scale if scale > 0.0 else (copysign(inf, away) if away else 0.0)

    def _scale(self, window: SortedWindow, center: float, mad: float, floor: float) -> float:
        n = len(window.ordered)
        if n != self._factor_n:
            self._factor_n, self._factor = n, widening_mad(n)
        scale = max(MAD_TO_SIGMA * mad, floor)
        if scale == 0.0:
            scale = MEAN_DEVIATION_TO_SIGMA * sum(abs(v - center) for v in window.ordered) / n
        return scale * self._factor

    def _far_enough(self, score: float, value: float) -> float:
        """The score of a value that breaches, unless its ratio to the median is too small for that."""
        normal = self.normal
        if normal == 0.0:
            return 0.0  # half of the window is nothing, as of a margin that is mostly kept: no value is a ratio of that
        if not self._breaches(score) or normal is None or normal <= 0.0 or value <= 0.0:
            return score
        share = abs(log(value / normal)) / self._log_ratio
        if share >= 1.0:
            return 0.0 if self._usual(value, normal) else score
        limit = self._breaches.high if score > 0.0 else self._breaches.low
        return share * limit if limit is not None else 0.0

    def _usual(self, value: float, normal: float) -> bool:
        """Whether such values have been a regular part of the window."""
        seen = self._seen()
        older = len(seen) // 2
        half = sqrt(value * normal)
        beyond = sum((v > half) is (value > normal) for v in islice(seen, older))
        return beyond >= max(FEW, USUAL * older)

    def _seen(self) -> deque[float]:
        """Values of the window, oldest first."""
        return self._window.values

    def _learn(self, value: float, score: float | None) -> None:
        learnt, level = self._learning.admit(value, score, self._streak, self._value_scored)
        if level is not None:
            self._fill(level)
        elif learnt is not None:
            self._push(learnt)

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: list[float]) -> None:
        self._window.fill(values)

    def _value_scored(self, score: float) -> float:
        """The value that would have this score now, but for ``min_ratio``."""
        center, mad = self._window.center_and_mad()
        return center + score * self._scale(self._window, center, mad, FLOOR * abs(center))

    def value_at(self, score: float) -> float:
        """The value from which on this score counts as a breach."""
        value, normal = self._value_scored(score), self.normal
        if not self._log_ratio or normal is None or normal <= 0.0 or value <= 0.0:
            return value
        return max(value, normal * exp(self._log_ratio)) if score > 0.0 else min(value, normal * exp(-self._log_ratio))

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

    def __init__(self, window: int, min_samples: int, learning: Learning, min_ratio: float = 1.0) -> None:
        super().__init__(window, min_samples, learning, min_ratio)
        self._values: deque[float] = deque(maxlen=window)

    def update(self, value: float, step: int) -> float | None:
        logs = self._window
        logarithm = log(value) if value > 0.0 else -inf
        score: float | None = None
        if len(logs.ordered) >= self._min_samples:
            if value > 0.0 and logs.ordered[0] > -inf:
                center, mad = logs.center_and_mad()
                self.normal = exp(center)
                scale = MAD_TO_SIGMA * mad
                if scale > FLOOR and len(logs.ordered) == self._factor_n:  # the usual case
                    score = (logarithm - center) / (scale * self._factor)
                else:
                    score = self._score(logs, logarithm, center, mad, FLOOR)
            else:
                plain = self._plain()
                center, mad = plain.center_and_mad()
                self.normal = center
                score = self._score(plain, value, center, mad, FLOOR * abs(center))
        if self._learning.plain:
            self._values.append(value)
            logs.push(logarithm)
        else:
            self._learn(value, score)
        if self._log_ratio and score is not None and not self._low <= score <= self._high:
            return self._far_enough(score, value)
        return score

    def _seen(self) -> deque[float]:
        return self._values

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

    def _value_scored(self, score: float) -> float:
        logs = self._window
        if logs.ordered[0] > -inf:
            center, mad = logs.center_and_mad()
            try:
                return exp(center + score * self._scale(logs, center, mad, FLOOR))
            except OverflowError:
                return inf
        plain = self._plain()
        center, mad = plain.center_and_mad()
        return center + score * self._scale(plain, center, mad, FLOOR * abs(center))

    def state(self) -> Any:
        return {"window": list(self._values), "streak": self._streak[:]}


def compile_robust_z(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "robust_z")
    window = sample_count(options, "window", 200, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="include", window=window)
    use_log, min_ratio = bool(options.get("log", False)), float(options.get("min_ratio", 1.0))

    def make() -> Scorer:
        return (RobustZOfLog if use_log else RobustZ)(window, min_samples, learning, min_ratio)

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
            "While all is positive, only a value at least this many times above or below the median can breach, and not if"
            " one in ten of the window's older half was at least half as far away (1).",
            minimum=1,
        ),
    ),
    compile_robust_z,
    help="Distance from the median of the window before the sample, in MADs scaled to sigmas.",
)
