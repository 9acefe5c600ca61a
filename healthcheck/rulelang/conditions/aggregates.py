"""``mean``, ``min``, ``max``, ``percentile``: a statistic of the window, the sample included."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored, Scorer
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    UnboundedScorer,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import SortedWindow


class WindowMean(UnboundedScorer):
    """Mean of the window, in constant time.

    The sum is kept relative to a shift near the data, and taken afresh once per window, so that
    rounding errors neither cancel nor pile up.
    """

    __slots__ = ("_min_samples", "_shift", "_size", "_sum", "_until_fresh", "_values")

    def __init__(self, window: int, min_samples: int) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._size = self._until_fresh = window
        self._min_samples = min_samples
        self._shift = self._sum = 0.0

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        window, shift = self._values, self._shift
        found: Found = ()
        for value in values:
            n = len(window)
            if n == self._size:
                total = self._sum + (value - shift) - (window[0] - shift)
            elif n:
                total = self._sum + (value - shift)
                n += 1
            else:
                shift, total, n = value, 0.0, 1
                self._shift = shift
            window.append(value)
            self._sum = total
            self._until_fresh -= 1
            if not self._until_fresh:
                shift = self._shift = sum(window) / n
                total = self._sum = sum([v - shift for v in window])
                self._until_fresh = self._size
            score = shift + total / n
            # The sample itself is part of the window, so `min_samples` counts it.
            if n < self._min_samples:
                found = found or []
                found.append((None, None))
            elif found:
                found.append((score, None))
            elif not quiet.low <= score <= quiet.high:
                found = [(score, None)]
        return found

    def state(self) -> Any:
        """The sum as well as the values: a restored window must round like the old one."""
        return [list(self._values), self._shift, self._sum, self._until_fresh]

    def restore(self, state: Any) -> None:
        values, shift, total, until_fresh = state
        self._values.clear()
        self._values.extend(float(v) for v in values)
        self._shift, self._sum, self._until_fresh = float(shift), float(total), int(until_fresh)


class WindowQuantile(UnboundedScorer):
    """Quantile of the window; 0 is the minimum, 1 the maximum."""

    __slots__ = ("_fraction", "_min_samples", "_window")

    def __init__(self, window: int, min_samples: int, fraction: float) -> None:
        self._window = SortedWindow(window)
        self._min_samples = min_samples
        self._fraction = fraction

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        ordered, seen, size = self._window.ordered, self._window.values, self._window.size
        n = len(ordered)
        found: Found = ()
        for value in values:
            # `SortedWindow.push` written out, without its median: no call for each sample.
            if n == size:
                del ordered[bisect_left(ordered, seen.popleft())]
            else:
                n += 1
            seen.append(value)
            insort(ordered, value)
            if n < self._min_samples:
                found = found or []
                found.append((None, None))
                continue
            # Linear interpolation between the two nearest values (Hyndman and Fan's type 7).
            place = self._fraction * (n - 1)
            at = int(place)
            score = ordered[at]
            if at + 1 < n:
                score += (place - at) * (ordered[at + 1] - score)
            if found:
                found.append((score, None))
            elif not quiet.low <= score <= quiet.high:
                found = [(score, None)]
        return found

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
        return CompiledCondition(
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
