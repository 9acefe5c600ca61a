"""The scorers of ``ratio`` to a moving middle: one class per kind of baseline. Best and first stand in ``landmarks.py``."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from healthcheck.protocols import Promise
from healthcheck.rulelang.conditions.foresight import certain, median_within, narrowed
from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.windows import MomentsWindow, SortedWindow

MOST = 32
"""Values for which a ratio to the median foresees at most."""


class Ratio:
    """x / baseline. No score while the baseline is not positive: a ratio to it means nothing."""

    __slots__ = ("_learning", "_min_samples", "_streak", "normal", "score", "window")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self.score: float | None = None
        """Of the last value."""
        self.window = window
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []

    def update(self, value: float, step: int) -> float | None:
        baseline = self._baseline()
        score: float | None = None
        if baseline is not None and baseline > 0.0:
            self.normal = baseline
            score = value / baseline
        self.score = score
        if self._learning.plain:
            self._push(value)
        else:
            learnt, level = self._learning.admit(value, score, self._streak, self.value_at)
            if level is not None:
                self._fill(level)
            elif learnt is not None:
                self._push(learnt)
        return score

    def join(self, other: Any) -> Echo | None:
        """Two ratios to the same baseline, as in ``above: 0.97`` and ``below: 1.03``, are computed once."""
        alike = type(other) is type(self) and other.window == self.window and other._min_samples == self._min_samples
        return Echo(other) if alike and self._learning.plain and other._learning.plain else None

    def foresee(self, last: float, low: float, high: float) -> Promise | None:
        """Baselines that follow each value promise nothing."""
        return None

    def value_at(self, score: float) -> float:
        """The value that would have this score now."""
        return score * (self._baseline() or 0.0)

    def _baseline(self) -> float | None:
        raise NotImplementedError

    def _push(self, value: float) -> None:
        raise NotImplementedError

    def _fill(self, values: list[float]) -> None:
        raise NotImplementedError

    def _memory(self) -> Any:
        raise NotImplementedError

    def _remember(self, memory: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        return {"memory": self._memory(), "streak": self._streak[:]}

    def restore(self, state: Any) -> None:
        self._remember(state["memory"])
        self._streak = list(state["streak"])


class Echo:
    """The score that another ratio has just computed for the same value."""

    __slots__ = ("_other", "normal")

    def __init__(self, other: Ratio) -> None:
        self.normal: float | None = None
        self._other = other

    def update(self, value: float, step: int) -> float | None:
        return self._other.score

    def foresee(self, last: float, low: float, high: float) -> Promise | None:
        return self._other.foresee(last, low, high)

    def skim(self, values: Sequence[float], steps: Sequence[int], low: float, high: float) -> int:
        """The other learns."""
        return len(values) if low == -inf and high == inf else 0

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


class RatioToMedian(Ratio):
    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = SortedWindow(window)

    def update(self, value: float, step: int) -> float | None:
        if not self._learning.plain:
            return super().update(value, step)
        window = self._window
        score: float | None = None
        if len(window.ordered) >= self._min_samples:
            baseline = window.median()
            if baseline > 0.0:
                self.normal = baseline
                score = value / baseline
        self.score = score
        window.push(value)
        return score

    def foresee(self, last: float, low: float, high: float) -> Promise | None:
        n = len(self._window.ordered)
        count = min(MOST, n // 4)
        if n < self._min_samples or not self._learning.plain or not count:
            return None
        bounds = self._within(low, high, count)
        return None if bounds is None else (*bounds, count)

    def skim(self, values: Sequence[float], steps: Sequence[int], low: float, high: float) -> int:
        count = len(values)
        if low > -inf or high < inf:
            count = certain(values, self._within(low, high, count))
        self._window.extend(values[:count])
        return count

    def _within(self, low: float, high: float, count: int) -> tuple[float, float] | None:
        """Values whose score lies within the limits, whatever the median is by then."""
        medians = median_within(self._window.ordered, count)
        if medians is None or medians[0] <= 0.0:
            return None
        return narrowed(low * medians[low > 0.0], high * medians[high < 0.0])

    def _baseline(self) -> float | None:
        return self._window.median() if len(self._window.ordered) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: list[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return list(self._window.values)

    def _remember(self, memory: Any) -> None:
        self._window.fill(memory)


class RatioToMean(Ratio):
    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = MomentsWindow(window)

    def _baseline(self) -> float | None:
        return self._window.mean() if len(self._window) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: list[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return self._window.state()

    def _remember(self, memory: Any) -> None:
        self._window.restore(memory)


class RatioToEwma(Ratio):
    """Exponential mean with weight 2 / (window + 1), started at the plain mean of the first samples."""

    __slots__ = ("_count", "_mean", "_weight")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._weight = 2.0 / (window + 1.0)
        self._mean, self._count = 0.0, 0

    def _baseline(self) -> float | None:
        return self._mean if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._count += 1
        self._mean += max(self._weight, 1.0 / self._count) * (value - self._mean)

    def _fill(self, values: list[float]) -> None:
        self._mean, self._count = 0.0, 0
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._mean, self._count]

    def _remember(self, memory: Any) -> None:
        self._mean, self._count = float(memory[0]), int(memory[1])
