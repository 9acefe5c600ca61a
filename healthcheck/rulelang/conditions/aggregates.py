"""``mean``, ``min``, ``max``, ``percentile``: a statistic of the window, the sample included."""

from __future__ import annotations

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
from healthcheck.rulelang.conditions.windows import MomentsWindow, SortedWindow


class WindowMean:
    __slots__ = ("_min_samples", "_window", "normal")

    def __init__(self, window: int, min_samples: int) -> None:
        self.normal: float | None = None
        self._window = MomentsWindow(window)
        self._min_samples = min_samples

    def update(self, value: float, step: int) -> float | None:
        self._window.push(value)
        return self._window.mean() if len(self._window.values) >= self._min_samples else None

    def state(self) -> Any:
        return self._window.state()

    def restore(self, state: Any) -> None:
        self._window.restore(state)


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
