"""A condition: how many times its first value a metric has grown to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck import Bound, CompiledCondition, Condition, ConditionType, Scored, Threshold, exact_bound


class Growth:
    """Memory of one series: its first value above zero. The score is value / first."""

    def __init__(self) -> None:
        self.normal: float | None = None

    @property
    def memoryless(self) -> bool:
        """Once the first value is known nothing more is learnt: healthy values need not even be handed over."""
        return self.normal is not None

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        scored: list[Scored] = []
        for value in values:
            if self.normal is not None:
                scored.append((value / self.normal, self.normal))
                continue
            scored.append((None, None))  # nothing came before it, so there is nothing to judge
            if value > 0:
                self.normal = value
        return scored

    def bound(self, healthy: Bound) -> Bound | None:
        """Values that would be fine: what lets a rule hold back an update before its value has been judged."""
        first = self.normal
        if first is None:
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
        Threshold("at_least", options, text=f"at least {options:g} times the first value"),
        Growth,
        "{series} {value} is {score:.1f} times its first value {normal}",
        bounded=True,
    )


GROWN = ConditionType(
    name="healthcheck_example.grown",
    schema={"type": "number", "exclusiveMinimum": 1, "description": "How many times the first value is too much."},
    compile=compile_grown,
    help="fires when a metric has grown to N times its first value",
)
