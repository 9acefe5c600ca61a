"""A condition: how many times its first value a metric has grown to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck import Comparator, Condition, ConditionType


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The test of the score, with the words that messages use."""

    bound: float

    @property
    def text(self) -> str:
        return f"at least {self.bound:g} times the first value"

    def __call__(self, score: float) -> bool:
        return score >= self.bound


class Growth:
    """Memory of one series: its first value. The score is value / first."""

    def __init__(self) -> None:
        self.normal: float | None = None

    def update(self, value: float, step: int) -> float | None:
        if self.normal is None:
            self.normal = value
            return None  # nothing came before it, so there is nothing to judge
        return value / self.normal if self.normal else None

    def state(self) -> Any:
        return self.normal

    def restore(self, state: Any) -> None:
        self.normal = state


@dataclass(frozen=True, slots=True)
class Grown:
    """The compiled condition: shared by all series of a rule, so it holds no memory itself."""

    breaches: Comparator
    name: str = "healthcheck_example.grown"
    judges_nonfinite: bool = False
    absence: str = ""
    baseline: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> Growth:
        return Growth()


def compile_grown(options: Any, rule: Mapping[str, Any]) -> Condition:
    """``healthcheck_example.grown: 10``; the schema below has checked that it is a number above 1."""
    return Grown(breaches=AtLeast(float(options)))


GROWN = ConditionType(
    name="healthcheck_example.grown",
    schema={"type": "number", "exclusiveMinimum": 1, "description": "How many times the first value is too much."},
    compile=compile_grown,
    help="fires when a metric has grown to N times its first value",
)
