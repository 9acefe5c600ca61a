"""``nonfinite``: a NaN or an infinity was seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.comparators import count_reached
from healthcheck.rulelang.conditions.base import Compiled, OptionError, options_schema, sample_count, window_schema


class NonFinite:
    """Score 1.0 for NaN and infinity, 0.0 for a number."""

    __slots__ = ("normal",)

    is_finiteness = True
    """Lets the engine leave out the call of ``update``."""

    def __init__(self) -> None:
        self.normal: float | None = None

    def update(self, value: float, step: int) -> float | None:
        return 0.0 if isfinite(value) else 1.0

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


class NonFiniteCount:
    """Score: how many of the last ``window`` values were not finite."""

    __slots__ = ("_count", "_seen", "normal")

    def __init__(self, window: int) -> None:
        self.normal: float | None = None
        self._seen: deque[int] = deque(maxlen=window)
        self._count = 0

    def update(self, value: float, step: int) -> float | None:
        seen = self._seen
        if len(seen) == seen.maxlen:
            self._count -= seen[0]
        bad = 0 if isfinite(value) else 1
        seen.append(bad)
        self._count += bad
        return float(self._count)

    def state(self) -> Any:
        return "".join(map(str, self._seen))

    def restore(self, state: Any) -> None:
        self._seen.clear()
        self._seen.extend(int(c) for c in state)
        self._count = sum(self._seen)


def compile_nonfinite(options: Any, rule: Mapping[str, Any]) -> Condition:
    if options is False:
        raise OptionError("`nonfinite: false` asks nothing; to switch the rule off write `rule-id: off`")
    if not isinstance(options, Mapping) or not options:
        return Compiled(
            "nonfinite", count_reached(1, "non-finite"), NonFinite, "{series} is {value}", judges_nonfinite=True
        )
    count = sample_count(options, "count", 1)
    window = sample_count(options, "window", count)
    if count > window:
        raise OptionError(f"count {count} can never be reached in a window of {window}", "count")
    return Compiled(
        "nonfinite",
        count_reached(count, f"non-finite {count} times in {window} samples"),
        lambda: NonFiniteCount(window),
        "{series} was not finite {score:.0f} times in the last {window} samples",
        judges_nonfinite=True,
        window=window,
    )


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
