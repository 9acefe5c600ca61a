"""``mean``, ``min``, ``max``, ``percentile``: a statistic of the window, the sample included."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType, Scorer
from healthcheck.rulelang.conditions.base import (
    Compiled,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.windows import SortedWindow


class WindowMean:
    """Mean of the window, in constant time.

    The sum is kept relative to a shift near the data, and taken afresh once per window, so that
    rounding errors neither cancel nor pile up.
    """

    __slots__ = ("_min_samples", "_shift", "_sum", "_until_fresh", "_values", "normal")

    def __init__(self, window: int, min_samples: int) -> None:
        self.normal: float | None = None
        self._values: deque[float] = deque(maxlen=window)
        self._min_samples = min_samples
        self._shift = self._sum = 0.0
        self._until_fresh = window

    def update(self, value: float, step: int) -> float | None:
        values = self._values
        n = len(values)
        if not n:
            self._shift = value
        shift = self._shift
        total = self._sum + (value - shift)
        if n == values.maxlen:
            total -= values[0] - shift
        else:
            n += 1
        values.append(value)
        self._until_fresh -= 1
        if self._until_fresh <= 0:
            shift = self._shift = sum(values) / n
            total = sum([v - shift for v in values])
            self._until_fresh = values.maxlen or 1
        self._sum = total
        return shift + total / n if n >= self._min_samples else None

    def state(self) -> Any:
        """The sum as well as the values: a restored window must round like the old one."""
        return [list(self._values), self._shift, self._sum, self._until_fresh]

    def restore(self, state: Any) -> None:
        values, shift, total, until_fresh = state
        self._values.clear()
        self._values.extend(float(v) for v in values)
        self._shift, self._sum, self._until_fresh = float(shift), float(total), int(until_fresh)


class WindowQuantile:
    """Quantile of the window; 0 is the minimum, 1 the maximum."""

    __slots__ = ("_fraction", "_min_samples", "_window", "normal")

    def __init__(self, window: int, min_samples: int, fraction: float) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window)
        self._min_samples = min_samples
        self._fraction = fraction

    def update(self, value: float, step: int) -> float | None:
        self._window.push(value)
        return self._window.quantile(self._fraction) if len(self._window.values) >= self._min_samples else None

    def state(self) -> Any:
        return list(self._window.values)

    def restore(self, state: Any) -> None:
        self._window.fill(state)


def _type(name: str, what: str) -> ConditionType:
    def compile(options: Any, rule: Mapping[str, Any]) -> Condition:
        breaches = the_comparator(options, name)
        window = sample_count(options, "window", 100)
        min_samples = min_samples_of(rule, window)
        label = name

        def make() -> Scorer:
            if name == "mean":
                return WindowMean(window, min_samples)
            return WindowQuantile(window, min_samples, fraction)

        fraction = {"min": 0.0, "max": 1.0}.get(name, 0.5)
        if name == "percentile":
            p = float(options["p"])
            fraction, label = p / 100.0, f"percentile {p:g}"
        return Compiled(
            name,
            breaches,
            make,
            f"{label} of {{series}} over {window} samples is {{score:.4g}}, {{threshold}}",
            min_samples=min_samples,
            window=window,
        )

    own: dict[str, Any] = {
        "window": window_schema("Samples in the window, at most; it judges from `min_samples` on.", 1)
    }
    required: tuple[str, ...] = ()
    if name == "percentile":
        own["p"] = number_schema("Which percentile, 0 to 100: 50 is the median.", minimum=0, maximum=100)
        required = ("p",)
    return ConditionType(
        name, options_schema(f"{what} of the window.", required=required, **own), compile, help=f"{what} of the window."
    )


AGGREGATES = (
    _type("mean", "Mean"),
    _type("min", "Smallest value"),
    _type("max", "Largest value"),
    _type("percentile", "Percentile `p`"),
)
