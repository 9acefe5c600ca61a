"""``no_improvement`` and ``unchanged``: values that stand still."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.comparators import count_reached
from healthcheck.rulelang.conditions.base import (
    Compiled,
    OptionError,
    choice_schema,
    options_schema,
    sample_count,
    window_schema,
)
from healthcheck.rulelang.quantities import QuantityError, parse_quantity


class NoImprovement:
    """Score: samples since the best value was last beaten by more than the wanted margin."""

    __slots__ = ("_best", "_down", "_min_abs", "_min_rel", "_recent", "_since", "normal")

    def __init__(self, *, down: bool, min_rel: float, min_abs: float, smooth: int) -> None:
        self.normal: float | None = None
        self._down = down
        self._min_rel, self._min_abs = min_rel, min_abs
        self._recent: deque[float] = deque(maxlen=smooth)
        self._best: float | None = None
        self._since = 0

    def update(self, value: float, step: int) -> float | None:
        if self._recent.maxlen != 1:
            self._recent.append(value)
            if len(self._recent) < (self._recent.maxlen or 1):
                return None
            value = sum(self._recent) / len(self._recent)
        best = self._best
        if best is None:
            self._best = self.normal = value
            return None
        gain = best - value if self._down else value - best
        if gain > self._min_abs and gain > self._min_rel * abs(best):
            self._best = self.normal = value
            self._since = 0
        else:
            self._since += 1
        return float(self._since)

    def state(self) -> Any:
        return [self._best, self._since, list(self._recent)]

    def restore(self, state: Any) -> None:
        self._best, self._since = state[0], int(state[1])
        self.normal = self._best
        self._recent.clear()
        self._recent.extend(state[2])


class Unchanged:
    """Score: how many samples in a row were equal, bit for bit, to the one before them."""

    __slots__ = ("_last", "_run", "normal")

    def __init__(self) -> None:
        self.normal: float | None = None
        self._last: float | None = None
        self._run = 0

    def update(self, value: float, step: int) -> float | None:
        last, self._last = self._last, value
        if last is None:
            return None
        self.normal = last
        self._run = self._run + 1 if value == last else 0
        return float(self._run)

    def state(self) -> Any:
        return [self._last, self._run]

    def restore(self, state: Any) -> None:
        self._last, self._run = state[0], int(state[1])


def compile_no_improvement(options: Any, rule: Mapping[str, Any]) -> Condition:
    over = sample_count(options, "over", 1000)
    try:
        min_rel = parse_quantity(options.get("min_rel", 0.0))
    except QuantityError as error:
        raise OptionError(str(error), "min_rel") from None
    try:
        min_abs = parse_quantity(options.get("min_abs", 0.0))
    except QuantityError as error:
        raise OptionError(str(error), "min_abs") from None
    if min_rel < 0 or min_abs < 0:
        raise OptionError("a margin cannot be negative", "min_rel" if min_rel < 0 else "min_abs")
    smooth = sample_count(options, "smooth", 1)
    down = options.get("mode", "min") == "min"
    return Compiled(
        "no_improvement",
        count_reached(over, f"no improvement in {over} samples"),
        lambda: NoImprovement(down=down, min_rel=min_rel, min_abs=min_abs, smooth=smooth),
        "{series} {value} has not improved on {normal} for {score:,.0f} samples",
        min_samples=2,
        window=over,
    )


def compile_unchanged(options: Any, rule: Mapping[str, Any]) -> Condition:
    if options is False:
        raise OptionError("`unchanged: false` asks nothing; to switch the rule off write `rule-id: off`")
    over = sample_count(options, "over", 1) if isinstance(options, Mapping) else 1
    return Compiled(
        "unchanged",
        count_reached(over, f"unchanged for {over} sample{'s' if over != 1 else ''}"),
        Unchanged,
        "{series} has been exactly {value} for {score:,.0f} samples more",
        min_samples=2,
        window=over,
    )


NO_IMPROVEMENT = ConditionType(
    "no_improvement",
    options_schema(
        "The best value has not been beaten for `over` samples.",
        compare=False,
        required=("over",),
        over=window_schema("Samples without improvement that breach.", least=1),
        min_rel={
            "description": "Improvement that counts, as a share of the best value (0).",
            "allOf": [{"$ref": "#/definitions/quantity"}],
        },
        min_abs={
            "description": "Improvement that counts, in the metric's unit (0).",
            "allOf": [{"$ref": "#/definitions/quantity"}],
        },
        mode=choice_schema("Whether lower (`min`, default) or higher (`max`) is better.", "min", "max"),
        smooth=window_schema(
            "Judge the mean of this many samples, so that one lucky value is not the best (1).", least=1
        ),
    ),
    compile_no_improvement,
    help="The best value has not been beaten for `over` samples.",
)

UNCHANGED = ConditionType(
    "unchanged",
    {
        **options_schema(
            "The value is bit for bit the same as before, `over` samples in a row.",
            compare=False,
            over=window_schema("Samples in a row that equal the one before them (1).", least=1),
        ),
        "type": ["object", "boolean"],
    },
    compile_unchanged,
    help="The value is bit for bit the same as before.",
    shorthand=True,
)
