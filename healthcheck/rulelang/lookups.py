"""The past of a metric as formulas look it up: ``ewma(m, n)``, ``mean(m, n)``, ``last(m)``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any


class Past:
    """The memory of one look-up. Only finite values enter means."""

    def __init__(self, kind: str, metric: str, length: int) -> None:
        self.kind = kind
        self.metric = metric
        self.length = length
        self.count = 0
        self.window: deque[float] = deque(maxlen=length if kind == "mean" else 1)
        self._value: float | None = None
        self.feed: Callable[[float], None] = getattr(self, f"_feed_{kind}")
        """Take one value of the metric."""

    def _feed_last(self, value: float) -> None:
        self._value = value

    def _feed_mean(self, value: float) -> None:
        if value - value == 0.0:
            self.count += 1
            self.window.append(value)

    def _feed_ewma(self, value: float) -> None:
        if value - value == 0.0:
            self.count += 1
            weight = max(2.0 / (self.length + 1.0), 1.0 / self.count)
            self._value = value if self._value is None else self._value + weight * (value - self._value)

    @property
    def value(self) -> float | None:
        """What the formula sees; None before the first value."""
        if self.kind == "mean":
            return math.fsum(self.window) / len(self.window) if self.window else None
        return self._value

    def state(self) -> Any:
        return [_to_json(self.value), self.count, list(self.window)]

    def restore(self, state: Any) -> None:
        self._value = None if state[0] is None else float(state[0])
        self.count = int(state[1])
        self.window.clear()
        self.window.extend(float(v) for v in state[2])


def _to_json(value: float | None) -> Any:
    return value if value is None or math.isfinite(value) else repr(value)
