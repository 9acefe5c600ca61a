"""Rules from YAML text, samples from lists: the engine as replay, tests and live runs use it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import NO_LABELS, Labels, Sample
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import Evaluation
from healthcheck.rulelang.compile import load_rules

nan = float("nan")


class Bench:
    """An engine plus what it said, fed one step at a time."""

    def __init__(self, text: str, **options: Any) -> None:
        self.rules = load_rules([textwrap.dedent(text)], registry=plugin_host().registry)
        self.engine = Engine(self.rules, watch_transitions=True, **options)
        self.results: list[Evaluation] = []

    def step(self, step: int, now: float | None = None, phase: str = "train", **metrics: float | None) -> Evaluation:
        samples = [
            Sample(name.replace("__", "."), step, value, phase=phase)
            for name, value in metrics.items()
            if value is not None
        ]
        result = self.engine.evaluate(step, samples, float(step) if now is None else now)
        self.results.append(result)
        return result

    def series(self, metric: str, values: Sequence[float | None], start: int = 1) -> None:
        for step, value in enumerate(values, start):
            self.step(step, **{metric.replace(".", "__"): value})

    def family(self, step: int, metric: str, values: dict[str, float], label: str = "parameter") -> Evaluation:
        made: list[Sample] = []
        for name, value in values.items():
            labels: Labels = ((label, name),) if name else NO_LABELS
            made.append(Sample(metric, step, value, labels))
        return self.engine.evaluate(step, made, float(step))

    def fired(self, rule: str) -> list[int]:
        return [a.fired_step for a in self.engine.alerts if a.rule == rule]

    def cleared(self, rule: str) -> list[int | None]:
        return [a.cleared_step for a in self.engine.alerts if a.rule == rule]

    def actions(self) -> list[tuple[str, str, str]]:
        return [(p.alert.rule, p.spec.name, p.held) for r in self.results for p in r.plan]


@pytest.fixture
def bench() -> Callable[..., Bench]:
    def make(text: str, **options: Any) -> Bench:
        head = "" if "version:" in text else "version: 1\n"
        return Bench(head + textwrap.dedent(text), **options)

    return make
