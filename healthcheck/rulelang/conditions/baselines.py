"""The scorers of ``ratio`` to a moving middle: one class per kind of baseline. Best and first stand in ``landmarks.py``."""

from __future__ import annotations

from typing import Any

from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.windows import MomentsWindow, SortedWindow


class Ratio:
    """x / baseline. No score while the baseline is not positive: a ratio to it means nothing."""

    __slots__ = ("_learning", "_min_samples", "_streak", "normal", "window")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
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
        if self._learning.plain:
            self._push(value)
        else:
            learnt, level = self._learning.admit(value, score, self._streak, self.value_at)
            if level is not None:
                self._fill(level)
            elif learnt is not None:
                self._push(learnt)
        return score

    def join(self, other: Any) -> Ratio | None:
        """Two ratios to the same baseline, as in ``above: 0.97`` and ``below: 1.03``, are one."""
        alike = type(other) is type(self) and other.window == self.window and other._min_samples == self._min_samples
        return other if alike and self._learning.plain and other._learning.plain else None

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
            baseline = window.median
            if baseline > 0.0:
                self.normal = baseline
                score = value / baseline
        window.push(value)
        return score

    def _baseline(self) -> float | None:
        return self._window.median if len(self._window.ordered) >= self._min_samples else None

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
