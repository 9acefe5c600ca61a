"""``delta`` and ``increase``: how much a value changed over the last samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import (
    Compiled,
    flag_schema,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)


class Delta:
    """x minus the value ``over`` samples earlier; with ``relative`` divided by that value's size."""

    __slots__ = ("_past", "_relative", "normal")

    def __init__(self, over: int, relative: bool) -> None:
        self.normal: float | None = None
        self._past: deque[float] = deque(maxlen=over)
        self._relative = relative

    def update(self, value: float, step: int) -> float | None:
        past = self._past
        score: float | None = None
        if len(past) == past.maxlen:
            before = self.normal = past[0]
            score = value - before
            if self._relative:
                score = score / abs(before) if before else None
        past.append(value)
        return score

    def state(self) -> Any:
        return list(self._past)

    def restore(self, state: Any) -> None:
        self._past.clear()
        self._past.extend(state)


class Increase:
    """Growth of a counter over the window. A counter that fell was reset and starts from zero."""

    __slots__ = ("_growth", "_last", "_min_samples", "_total", "normal")

    def __init__(self, window: int, min_samples: int) -> None:
        self.normal: float | None = None
        self._growth: deque[float] = deque(maxlen=window)
        self._last: float | None = None
        self._total = 0.0
        self._min_samples = min_samples

    def update(self, value: float, step: int) -> float | None:
        last, growth = self._last, self._growth
        self._last = value
        if last is None:
            return None
        grown = value - last if value >= last else max(value, 0.0)
        full = len(growth) == growth.maxlen
        gone = growth[0] if full else 0.0
        growth.append(grown)
        # Subtracting what left is exact for counters; anything else is summed afresh.
        self._total = self._total + grown - gone if grown.is_integer() and gone.is_integer() else sum(growth)
        return self._total if len(growth) + 1 >= self._min_samples else None

    def state(self) -> Any:
        return [list(self._growth), self._last, self._total]

    def restore(self, state: Any) -> None:
        self._growth.clear()
        self._growth.extend(float(v) for v in state[0])
        self._last = state[1]
        self._total = float(state[2])


def compile_delta(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "delta")
    over = sample_count(options, "over", 1)
    relative = bool(options.get("relative", False))
    what = "{score:.1%}" if relative else "{score:.4g}"
    return Compiled(
        "delta",
        breaches,
        lambda: Delta(over, relative),
        f"{{series}} {{value}} changed by {what} over {over} samples",
        min_samples=over + 1,
        window=over,
    )


def compile_increase(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "increase")
    window = sample_count(options, "window", 100)
    min_samples = max(2, min_samples_of(rule, window + 1, default=2))
    return Compiled(
        "increase",
        breaches,
        lambda: Increase(window, min_samples),
        "{series} grew by {score:.4g} over {window} samples",
        min_samples=min_samples,
        window=window,
    )


DELTA = ConditionType(
    "delta",
    options_schema(
        "Change over `over` samples.",
        over=window_schema("How many samples to look back (1).", least=1),
        relative=flag_schema("Divide the change by the size of the earlier value: 0.1 is 10 %."),
    ),
    compile_delta,
    help="Change of the value over `over` samples.",
)

INCREASE = ConditionType(
    "increase",
    options_schema(
        "Growth of a counter over the window; a reset to a smaller value starts from zero.",
        window=window_schema("Samples to look back.", least=1),
    ),
    compile_increase,
    help="Growth of a counter over the window; tolerates resets.",
)
