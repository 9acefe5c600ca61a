"""The past of a metric as formulas look it up: ``ewma(m, n)``, ``mean(m, n)``, ``last(m)``."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class Past:
    """The memory of one look-up. Only finite values enter means."""

    def __init__(self, kind: str, metric: str, length: int) -> None:
        self.kind = kind
        self.metric = metric
        self.length = length
        self.value: float | None = None
        self.count = 0
        self.window: deque[float] = deque(maxlen=length if kind == "mean" else 1)

    def feed(self, value: float) -> None:
        if self.kind == "last":
            self.value = value
        elif math.isfinite(value):
            self.count += 1
            if self.kind == "ewma":
                weight = max(2.0 / (self.length + 1.0), 1.0 / self.count)
                self.value = value if self.value is None else self.value + weight * (value - self.value)
            else:
                self.window.append(value)
                self.value = math.fsum(self.window) / len(self.window)

    def state(self) -> Any:
        return [_to_json(self.value), self.count, list(self.window)]

    def restore(self, state: Any) -> None:
        self.value = None if state[0] is None else float(state[0])
        self.count = int(state[1])
        self.window.clear()
        self.window.extend(float(v) for v in state[2])


def _to_json(value: float | None) -> Any:
    return value if value is None or math.isfinite(value) else repr(value)
