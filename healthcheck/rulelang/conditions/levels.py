"""Conditions on the value itself: the comparators, ``nonfinite``, and ``outlier`` among siblings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from healthcheck.core.protocols import EMPTY, FINITE, Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.comparators import COMPARATORS, Threshold
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    OptionError,
    UnboundedScorer,
    comparator_schemas,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
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
