"""The scorers of ``ratio`` to something that stays: the best value so far, and the first ones."""

from __future__ import annotations

from typing import Any

from healthcheck.rulelang.conditions.baselines import Ratio
from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.windows import SortedWindow


class RatioToBest(Ratio):
    """Best of all samples so far, or of the last ``window`` where one is given."""

    __slots__ = ("_best", "_count", "_largest", "_window")

    def __init__(self, window: int, min_samples: int, learning: Learning, *, largest: bool) -> None:
        super().__init__(window, min_samples, learning)
        self._largest = largest
        self._window = SortedWindow(window) if window else None
        self._best, self._count = 0.0, 0

    def join(self, other: Any) -> Ratio | None:
        return super().join(other) if getattr(other, "_largest", None) == self._largest else None

    def _baseline(self) -> float | None:
        if self._window is not None:
            if len(self._window) < self._min_samples:
                return None
            return self._window.ordered[-1 if self._largest else 0]
        return self._best if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        if self._window is not None:
            self._window.push(value)
        elif not self._count or (value > self._best) == self._largest:
            self._best = value
        self._count += 1

    def _fill(self, values: list[float]) -> None:
        self._count = 0
        if self._window is not None:
            self._window.fill(())
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._best, self._count, list(self._window.values) if self._window is not None else None]

    def _remember(self, memory: Any) -> None:
        self._best, self._count = float(memory[0]), int(memory[1])
        if self._window is not None:
            self._window.fill(memory[2] or ())


class RatioToFirst(Ratio):
    """Median of the first ``min_samples`` samples; it never changes afterwards."""

    __slots__ = ("_first", "_level")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._first = SortedWindow(min_samples)
        self._level: float | None = None
        """The median, once there is one that a ratio can be taken to, and nothing is left to learn."""

    def update(self, value: float, step: int) -> float | None:
        level = self._level
        if level is None:
            return super().update(value, step)
        return value / level

    @property
    def forgetful(self) -> bool:
        return self._level is not None

    def _baseline(self) -> float | None:
        if len(self._first.ordered) < self._min_samples:
            return None
        median = self._first.median
        if self._learning.plain and median > 0.0:
            self._level = median
        return median

    def _push(self, value: float) -> None:
        if len(self._first) < self._min_samples:
            self._first.push(value)

    def _fill(self, values: list[float]) -> None:
        self._first.fill(values)

    def _memory(self) -> Any:
        return list(self._first.values)

    def _remember(self, memory: Any) -> None:
        self._first.fill(memory)
        self._level = None
