"""``zscore``: standard deviations above the mean of the window before the sample."""

from __future__ import annotations

from collections.abc import Mapping
from math import copysign, inf
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import (
    Compiled,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.smallsample import widening
from healthcheck.rulelang.conditions.windows import MomentsWindow

FLOOR = 0.001
"""The scale is at least this share of the centre, so that a constant series divides by something."""


class ZScore:
    """(x - mean) / std over the samples before x, narrowed while the window has few of them."""

    __slots__ = ("_learning", "_min_samples", "_streak", "_window", "normal")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self._window = MomentsWindow(window)
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []

    def update(self, value: float, step: int) -> float | None:
        window = self._window
        score: float | None = None
        if len(window.values) >= self._min_samples:
            mean = self.normal = window.mean()
            scale = max(window.std(), FLOOR * abs(mean)) * widening(len(window.values))
            away = value - mean
            score = away / scale if scale > 0.0 else (copysign(inf, away) if away else 0.0)
        if self._learning.plain:
            window.push(value)
        else:
            learnt, level = self._learning.admit(value, score, self._streak, self.value_at)
            if level is not None:
                window.fill(level)
            elif learnt is not None:
                window.push(learnt)
        return score

    def value_at(self, score: float) -> float:
        """The value that would have this score now."""
        mean = self._window.mean()
        return mean + score * max(self._window.std(), FLOOR * abs(mean)) * widening(len(self._window))

    def state(self) -> Any:
        return {"window": self._window.state(), "streak": self._streak[:]}

    def restore(self, state: Any) -> None:
        self._window.restore(state["window"])
        self._streak = list(state["streak"])


def compile_zscore(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "zscore")
    window = sample_count(options, "window", 100, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="clip", window=window)
    return Compiled(
        "zscore",
        breaches,
        lambda: ZScore(window, min_samples, learning),
        "{series} {value} is {score:.1f} standard deviations from its recent mean {normal}",
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


ZSCORE = ConditionType(
    "zscore",
    options_schema("(x - mean) / std of the window before x.", window=window_schema()),
    compile_zscore,
    help="Standard deviations from the mean of the window before the sample.",
)
