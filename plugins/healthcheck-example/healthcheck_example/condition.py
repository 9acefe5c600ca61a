"""A condition: how many times its first value a metric has grown to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck import Bound, CompiledCondition, Condition, ConditionType, Scored, Threshold, exact_bound


class Growth:
    """Memory of one series: its first value. The score is value / first, if that is positive."""

    memoryless = False

    def __init__(self) -> None:
        self.normal: float | None = None

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        scored: list[Scored] = []
        for value in values:
            if self.normal is None:
                self.normal = value
                scored.append((None, value))  # nothing came before it, so there is nothing to judge
            else:
                scored.append((value / self.normal if self.normal > 0 else None, self.normal))
        return scored

    def bound(self, healthy: Bound) -> Bound | None:
        first = self.normal
        if first is None or first <= 0:
            return None
        return exact_bound(lambda value: value / first, healthy, healthy.low * first, healthy.high * first)

    def state(self) -> Any:
        return self.normal

    def restore(self, state: Any) -> None:
        self.normal = state


def compile_grown(options: Any, rule: Mapping[str, Any]) -> Condition:
    """``healthcheck_example.grown: 10``; the schema below has checked that it is a number above 1."""
    return CompiledCondition(
        "healthcheck_example.grown",
        Threshold("at_least", options, f"at least {options:g} times the first value"),
        Growth,
        bounded=True,
    )


GROWN = ConditionType(
    name="healthcheck_example.grown",
    schema={"type": "number", "exclusiveMinimum": 1, "description": "How many times the first value is too much."},
    compile=compile_grown,
    help="fires when a metric has grown to N times its first value",
)
