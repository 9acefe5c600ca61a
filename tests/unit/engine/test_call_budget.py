"""What a step costs, counted in function calls: the same number on every machine, however busy.

Times are measured by ``benchmarks/engine.py``. Here the kind of mistake is caught that makes each step dearer: a
call per sample that could have been made once, a rule that works between its turns.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import Moment
from healthcheck.engine.engine import Engine
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import RuleSet

WARM, STEPS = 300, 400
USUAL = {"lr": 3e-4, "amp.skipped": 0.0, "amp.skipped_streak": 0.0, "updates.missing": 1.0, "amp.scale": 65536.0}
METRICS = (
    "loss", "grad_norm", "lr", "throughput", "time.step", "time.data", "memory.fraction", "memory.allocated",
    "memory.host_fraction", "amp.scale", "amp.skipped", "amp.skipped_streak", "updates.missing",
)  # fmt: skip


def rules(text: str) -> RuleSet:
    return load_rules([f"version: 1\n{text}"], registry=plugin_host().registry)


def quiet_run(metrics: tuple[str, ...] = METRICS) -> Iterator[tuple[int, list[Sample]]]:
    noise = random.Random(0)
    for step in range(1, WARM + STEPS + 1):
        loss = 0.4 + 2.0 * 0.99**step
        values = {name: (loss if name == "loss" else 0.3) * (1 + 0.01 * noise.gauss(0, 1)) for name in metrics}
        yield step, [Sample(name, step, USUAL.get(name, value)) for name, value in values.items()]


def calls_per_step(ruleset: RuleSet, metrics: tuple[str, ...] = METRICS, block: int = 1) -> dict[str, float]:
    """Calls of Python functions and of C functions per step, once windows are full.

    :param block: steps that are judged together.
    """
    engine = Engine(ruleset)
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        counted[event] += 1

    moments = [Moment(step, samples, float(step)) for step, samples in quiet_run(metrics)]
    for moment in moments[:WARM]:
        engine.evaluate(*moment[:3])
    for begin in range(WARM, len(moments), block):
        given = moments[begin : begin + block]
        before = sys.getprofile()
        sys.setprofile(count)
        engine.judge(given)
        sys.setprofile(before)
    # One call of C belongs to taking the profile off.
    return {"python": counted["call"] / STEPS, "c": (counted["c_call"] - (STEPS + block - 1) // block) / STEPS}


def test_the_recommended_pack_keeps_to_its_budget() -> None:
    spent = calls_per_step(rules("extends: [healthcheck:recommended]"), block=32)

    assert spent["python"] <= 6.5
    assert spent["c"] <= 86


def test_a_step_that_is_a_block_of_its_own_does_so_as_well() -> None:
    spent = calls_per_step(rules("extends: [healthcheck:recommended]"))

    assert spent["python"] <= 51
    assert spent["c"] <= 190


def test_a_threshold_that_holds_costs_no_call() -> None:

    def thresholds(count: int) -> float:
        many = "\n".join(f"  r{i}: {{metric: x, when: {{above: {9 + i}}}}}" for i in range(count))
        return calls_per_step(rules(f"external: [x]\nrules:\n{many}"), ("x",))["python"]

    assert thresholds(30) == thresholds(10)


@pytest.mark.parametrize(
    ("when", "most"),
    [
        ("{robust_z: {above: 10, window: 128, log: true, min_ratio: 1.25}}", 0.1),
        ("{rebound: {above: 1.05, sigmas: 5, fell: 5%}}", 0.3),
        ("{drawdown: {above: 50%, sigmas: 4}}", 1.3),
        ("{mean: {above: 5, window: 50}}", 0.1),
        ("{ratio: {above: 2, to: first}}", 0.0),
        ("{slope: {above: 1, over: 50}}", 0.3),
        ("{all: [{ratio: {above: 10, to: first}}, {metric: grad_norm, above: 1}]}", 0.1),  # waits for the other metric
    ],
)
def test_a_condition_costs_less_than_a_call_a_sample(when: str, most: float) -> None:
    def cost(count: int) -> float:
        many = "\n".join(f"  r{i}: {{metric: loss, when: {when}}}" for i in range(count))
        return calls_per_step(rules(f"rules:\n{many}"), ("loss",), block=32)["python"]

    assert (cost(6) - cost(1)) / 5 <= most


def test_a_rule_rests_between_its_turns() -> None:
    """``every: 10`` costs a tenth of the calls; the watch for its turn costs none."""

    def cost(every: int, count: int) -> float:
        many = "\n".join(f"  r{i}: {{metric: x, when: {{mean: {{above: 5}}}}, every: {every}}}" for i in range(count))
        return calls_per_step(rules(f"external: [x]\nrules:\n{many}"), ("x",))["python"]

    often = (cost(1, 20) - cost(1, 5)) / 15
    seldom = (cost(10, 20) - cost(10, 5)) / 15
    assert seldom <= 0.1 * often + 0.05
