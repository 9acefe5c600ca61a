"""``stale`` and ``missing``: judged by the clock, since nothing happens when they should fire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.core.text import as_written
from healthcheck.rulelang.comparators import Threshold
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    OptionError,
    UnboundedScorer,
    number_schema,
    options_schema,
)
from healthcheck.rulelang.quantities import QuantityError, parse_duration, parse_span

STARTUP_SECONDS = 20 * 60.0
"""Budget until the first sample unless ``first`` says otherwise: compilation and data caching are
slow once, and killing a slow starter is the classic mistake of liveness probes."""


class Silence(UnboundedScorer):
    """Score: how long nothing has come. With ``times`` the limit also grows with what is usual.

    The score is scaled so that ``after`` stays the limit: with ``times: 5`` and a longest gap of 100 s,
    500 s of silence score as ``after``.
    """

    __slots__ = ("_after", "_longest", "_times", "normal")

    def __init__(self, after: float, times: float = 0.0) -> None:
        self.normal: float | None = None
        self._after = after
        self._times = times
        self._longest = 0.0

    def arrived(self, gap: float) -> None:
        if gap > self._longest:
            self._longest = gap
            if self._times:
                self.normal = gap

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        limit = max(self._after, self._times * self._longest)
        usual = limit == self._after
        return [(value if usual else value * self._after / limit, self.normal) for value in values]

    def state(self) -> Any:
        return self._longest

    def restore(self, state: Any) -> None:
        self._longest = float(state)
        if self._times and self._longest:
            self.normal = self._longest


def compile_stale(options: Any, rule: Mapping[str, Any]) -> Condition:
    written = options if isinstance(options, Mapping) else {"after": options}
    after = _duration(written, "after", nested=isinstance(options, Mapping))
    # A budget that is longer than the usual start must not be undercut by it.
    first = _duration(written, "first", nested=True) if "first" in written else max(STARTUP_SECONDS, after)
    times = float(written.get("times", 0.0))
    if after <= 0 or first <= 0:
        raise OptionError("a budget must be longer than zero", *(("first",) if first <= 0 else ()))
    return CompiledCondition(
        "stale",
        Threshold("at_least", f"{as_written(after)}s"),
        lambda: Silence(after, times),
        "no {series} for {value:,.0f} s",
        absence="seconds",
        first=first,
    )


def compile_missing(options: Any, rule: Mapping[str, Any]) -> Condition:
    written = options if isinstance(options, Mapping) else {"after": options}
    after = _steps(written, "after", nested=isinstance(options, Mapping))
    first = _steps(written, "first", nested=True) if "first" in written else after
    return CompiledCondition(
        "missing",
        Threshold("at_least", f"{after:g}"),
        lambda: Silence(after),
        "no {series} for {value:,.0f} steps",
        absence="steps",
        first=first,
    )


def _duration(written: Mapping[str, Any], key: str, *, nested: bool) -> float:
    try:
        return parse_duration(written[key])
    except QuantityError as error:
        raise OptionError(str(error), *((key,) if nested else ())) from None


def _steps(written: Mapping[str, Any], key: str, *, nested: bool) -> float:
    where = (key,) if nested else ()
    try:
        span = parse_span(written[key])
    except QuantityError as error:
        raise OptionError(str(error), *where) from None
    if span.unit != "steps" or span.amount < 1:
        raise OptionError(
            "`missing` counts steps without a sample; write for instance 100. For time use `stale`", *where
        )
    return span.amount


_LENGTH = {"$ref": "#/definitions/length"}

STALE = ConditionType(
    "stale",
    {
        **options_schema(
            "Seconds since the last sample: `300s`, or {after, first, times}. Judged by a watchdog, also between steps.",
            compare=False,
            required=("after",),
            after={"description": "Silence that breaches, with a unit: 300s, 5m.", "allOf": [_LENGTH]},
            first={"description": "Budget until the first sample (20m, or `after` if longer).", "allOf": [_LENGTH]},
            times=number_schema(
                "Also wait for this many times the longest gap seen so far: slow but regular is not stale (0: off).",
                minimum=0,
            ),
        ),
        "type": ["object", "string", "number"],
    },
    compile_stale,
    help="Nothing came for this long.",
)

MISSING = ConditionType(
    "missing",
    {
        **options_schema(
            "Steps without a sample: `100`, or {after, first}.",
            compare=False,
            required=("after",),
            after={"description": "Steps without a sample that breach.", "allOf": [_LENGTH]},
            first={"description": "Budget in steps until the first sample (`after`).", "allOf": [_LENGTH]},
        ),
        "type": ["object", "string", "integer"],
    },
    compile_missing,
    help="Training goes on and the metric does not come.",
)
