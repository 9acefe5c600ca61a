"""Conditions on a level: the value itself (the comparators, ``nonfinite``, ``outlier`` among siblings), or a statistic of the
last values (``mean``, ``min``, ``max``, ``percentile``)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from healthcheck.core.protocols import EMPTY, FINITE, Bound, Condition, ConditionType, Scored, Scorer
from healthcheck.rulelang.comparators import COMPARATORS, Threshold
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    OptionError,
    UnboundedScorer,
    comparator_schemas,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import SortedWindow
from healthcheck.rulelang.quantities import QuantityError


class ValueScorer:
    """The score is the value."""

    __slots__ = ()

    normal = None
    memoryless = True

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        found: list[Scored] = []
        for value in values:
            found.append((value, None))  # noqa: PERF401 - a run of one is the usual one: a comprehension costs a call more
        return found

    def bound(self, healthy: Bound) -> Bound | None:
        return healthy

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


class NonFinite:
    """Score 1.0 for NaN and infinity, 0.0 for a number."""

    __slots__ = ()

    normal = None
    memoryless = True

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        return [(0.0 if isfinite(value) else 1.0, None) for value in values]

    def bound(self, healthy: Bound) -> Bound | None:
        return FINITE if healthy.holds(0.0) else EMPTY

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


class NonFiniteCount(UnboundedScorer):
    """Score: how many of the last ``window`` values were not finite."""

    __slots__ = ("_count", "_seen")

    def __init__(self, window: int) -> None:
        self._seen: deque[int] = deque(maxlen=window)
        self._count = 0

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        seen = self._seen
        found: Found = ()
        for value in values:
            if len(seen) == seen.maxlen:
                self._count -= seen[0]
            bad = 0 if isfinite(value) else 1
            seen.append(bad)
            self._count += bad
            if found:
                found.append((float(self._count), None))
            elif not quiet.low <= self._count <= quiet.high:
                found = [(float(self._count), None)]
        return found

    def state(self) -> Any:
        return "".join(map(str, self._seen))

    def restore(self, state: Any) -> None:
        self._seen.clear()
        self._seen.extend(int(c) for c in state)
        self._count = sum(self._seen)


def threshold_type(kind: str) -> ConditionType:
    """The condition type of one comparator."""

    def compile(options: Any, rule: Mapping[str, Any]) -> Condition:
        try:
            breaches = Threshold(kind, options)
        except QuantityError as error:
            raise OptionError(str(error)) from None
        return CompiledCondition(kind, breaches, ValueScorer, "{series} {value} is {threshold}", bounded=breaches.exact)

    schema = comparator_schemas()[kind]
    return ConditionType(kind, schema, compile, help=str(schema["description"]).replace("score", "value"))


def compile_nonfinite(options: Any, rule: Mapping[str, Any]) -> Condition:
    if options is False:
        raise OptionError("`nonfinite: false` checks nothing; to switch the rule off write `rule-id: off`")
    if not isinstance(options, Mapping) or not options:
        return CompiledCondition(
            "nonfinite",
            Threshold("at_least", 1, "non-finite"),
            NonFinite,
            "{series} is {value}",
            judges_nonfinite=True,
            bounded=True,
        )
    # A count over a window draws no bound: finite values may breach by what came before them, and holding those back
    # would be no help.
    count = sample_count(options, "count", 1)
    window = sample_count(options, "window", count)
    if count > window:
        raise OptionError(f"count {count} can never be reached in a window of {window}", "count")
    return CompiledCondition(
        "nonfinite",
        Threshold("at_least", count, f"non-finite {count} times in {window} samples"),
        lambda: NonFiniteCount(window),
        "{series} was not finite {score:.0f} times in the last {window} samples",
        judges_nonfinite=True,
        window=window,
    )


def compile_outlier(options: Any, rule: Mapping[str, Any]) -> Condition:
    return CompiledCondition(
        "outlier",
        the_comparator(options, "outlier"),
        ValueScorer,  # it is given value / median of the siblings
        f"{{series}} {{value}} is {{score:.2f}} times the median over all {options['across']}s, {{normal}}",
        across=str(options["across"]),
    )


THRESHOLDS = tuple(threshold_type(kind) for kind in COMPARATORS)

NONFINITE = ConditionType(
    "nonfinite",
    {
        **options_schema(
            "NaN or infinity was seen; with options: `count` of them in the last `window` samples.",
            compare=False,
            count=window_schema("How many non-finite values breach (1).", least=1),
            window=window_schema("Samples to look back.", least=1),
        ),
        "type": ["object", "boolean"],
    },
    compile_nonfinite,
    help="The value is NaN or infinite.",
    shorthand=True,
)

OUTLIER = ConditionType(
    "outlier",
    options_schema(
        "value / median of the sibling series that differ from it in one label.",
        required=("across",),
        across={
            "description": "The label whose values are siblings: rank, parameter, group, ...",
            "type": "string",
            "minLength": 1,
        },
    ),
    compile_outlier,
    help="The value divided by the median of its sibling series.",
)


# --------------------------------------------------------------------------------------------------
# A statistic of the window, the sample included.


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


def _aggregate(name: str, what: str) -> ConditionType:
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
    _aggregate("mean", "Mean"),
    _aggregate("min", "Smallest value"),
    _aggregate("max", "Largest value"),
    _aggregate("percentile", "Percentile `p`"),
)
