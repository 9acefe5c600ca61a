"""A scorer takes runs of samples: how a stream is cut into runs, and what may be left out, must not matter."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from language import VARIANTS, condition, registry

from healthcheck.core.protocols import EMPTY, Bound, Condition, Scorer
from healthcheck.rulelang.compile import load_rules

PARTS: list[tuple[str, Any]] = [
    ("all", [{"ratio": {"above": 0.9, "window": 8}}, {"ratio": {"below": 1.1, "window": 8}}, {"above": 1}]),
    ("all", [{"slope": {"above": -1, "over": 12, "confidence": 0.9}}, {"ratio": {"above": 1.1, "to": "first"}}]),
    (
        "all",
        [
            {"slope": {"above": -1, "over": 12, "confidence": 0.9}},
            {"slope": {"below": 1, "over": 12, "confidence": 0.8}},
        ],
    ),
    ("any", [{"rebound": {"above": 1.5}}, {"ratio": {"above": 2, "to": "first"}}, {"equals": 2}]),
    ("any", [{"mean": {"above": 2, "window": 4}}, "nonfinite", {"unchanged": {"over": 2}}]),
]
POLICIES: list[dict[str, Any]] = [{}, {"outliers": "exclude"}, {"outliers": "clip", "reseed": 4}]


def made(name: str, options: Any, policy: dict[str, Any]) -> Condition:
    """The condition alone; `all` and `any` need a rule around them."""
    if name not in ("all", "any"):
        return condition(name, options, **policy)
    rule = {"metric": "x", "when": {name: options}}
    return (
        load_rules([{"version": 1, "external": ["x"], "rules": {"r": rule}}], registry=registry()).cause("r").condition
    )


def series(seed: int, length: int, *, nonfinite: bool) -> tuple[list[float], list[int]]:
    """Quiet stretches, jumps, ties, zeros; steps with gaps."""
    draw = random.Random(seed)
    level, step = draw.choice([0.5, 2.0, 40.0]), 0
    values, steps = [], []
    for _ in range(length):
        event = draw.random()
        if event < 0.1:
            level *= draw.choice([0.5, 3.0, 1.0])
        value = values[-1] if values and event > 0.85 else level * (1 + 0.05 * draw.gauss(0, 1))
        if event < 0.04:
            value = draw.choice([0.0, -1.0, 1e6])
        if nonfinite and draw.random() < 0.1:
            value = draw.choice([math.nan, math.inf])
        step += draw.choice([1, 1, 1, 10])
        values.append(value)
        steps.append(step)
    return values, steps


def fed(scorer: Scorer, values: Sequence[float], steps: Sequence[int], cuts: Sequence[int], quiet: Bound) -> list[Any]:
    """All that a scorer says; None where it left a score out."""
    found: list[Any] = []
    begin = 0
    for end in (*cuts, len(values)):
        if begin < end:
            run = scorer.update(values[begin:end], steps[begin:end], quiet)
            found += [None] * (end - begin - len(run)) + list(run)
        begin = end
    return found


@pytest.mark.parametrize(("name", "options"), [*VARIANTS, *PARTS], ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(
    max_examples=15, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)
@given(
    seed=st.integers(0, 10**9),
    cuts=st.lists(st.integers(1, 119), max_size=12, unique=True).map(sorted),
    limits=st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, 0.5]), st.sampled_from([0.0, 0.9, 1.5, 3.0, math.inf])),
)
def test_the_way_a_stream_is_cut_into_runs_does_not_matter(
    name: str, options: Any, policy: dict[str, Any], seed: int, cuts: list[int], limits: tuple[float, float]
) -> None:
    compiled = made(name, options, policy)
    values, steps = series(seed, 120, nonfinite=compiled.judges_nonfinite)
    singly, in_runs, sparing = compiled.start(), compiled.start(), compiled.start()
    quiet = Bound(*limits)

    wanted = fed(singly, values, steps, range(1, 120), EMPTY)

    assert fed(in_runs, values, steps, cuts, EMPTY) == wanted
    for said, full in zip(fed(sparing, values, steps, cuts, quiet), wanted, strict=True):
        if said is None:
            assert quiet.holds(full[0])
        else:
            assert said == full
    states = [json.dumps(scorer.state(), allow_nan=False) for scorer in (singly, in_runs, sparing)]
    assert states[0] == states[1] == states[2]
    assert singly.normal == in_runs.normal == sparing.normal


@pytest.mark.parametrize(("name", "options"), [*VARIANTS, *PARTS], ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("seed", range(5))
def test_a_scorer_without_a_memory_says_the_same_of_a_value_at_any_time(name: str, options: Any, seed: int) -> None:
    """Then values that are not handed over are missed by nobody."""
    compiled = made(name, options, {})
    values, steps = series(seed, 120, nonfinite=compiled.judges_nonfinite)
    scorer = compiled.start()
    told: dict[float, Any] = {}
    for value, step in zip(values, steps, strict=True):
        settled = scorer.memoryless
        ((score, normal),) = scorer.update((value,), (step,), EMPTY)
        if settled:
            assert scorer.memoryless
            assert told.setdefault(value, (score, normal)) == (score, normal) or value != value
            bound = scorer.bound(compiled.breaches.healthy)
            if compiled.breaches.exact and bound is not None and score is not None:
                assert bound.holds(value) != compiled.breaches(score)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("zscore", {**test, "window": 12}) for test in ({"above": 2}, {"below": -1}, {"outside": [-2, 1]})),
        *(("robust_z", {**test, "window": 12}) for test in ({"above": 2}, {"at_most": -1}, {"outside": [-2, 1]})),
        *(("robust_z", {"above": 2, "window": 30, "log": log, "min_ratio": 1.3}) for log in (False, True)),
        ("robust_z", {"outside": [-1, 1], "window": 30, "min_ratio": 1.1}),
        ("robust_z", {"at_least": 0.5, "window": 9, "log": True}),
        *(("ratio", {"above": 1.2, "to": to, "window": 9}) for to in ("median", "mean", "ewma", "best", "first")),
        ("ratio", {"outside": [0.7, 1.2], "window": 9}),
        ("ratio", {"at_most": 0.7, "window": 9}),
        ("above", 1.9),
        ("at_most", 1.9),
        ("outside", [1.5, 2.5]),
        ("nonfinite", True),
    ],
    ids=lambda v: v if isinstance(v, str) else ",".join(map(str, v.items())) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(
    max_examples=10, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)
@given(
    seed=st.integers(0, 10**9), choices=st.integers(0, 10**6).map(lambda n: random.Random(n).choices(range(6), k=80))
)
def test_a_published_bound_says_of_the_next_value_what_its_score_will_say(
    name: str, options: Any, policy: dict[str, Any], seed: int, choices: list[int]
) -> None:
    """To the last bit: some values are put right at the bound, and right beyond it."""
    compiled = made(name, options, policy)
    assert compiled.bounded
    scorer = compiled.start()
    usual, _ = series(seed, 80, nonfinite=False)
    # A sample that comes as soon as those before: a bound is asked before the next update, not after a gap.
    for step, (value, choice) in enumerate(zip(usual, choices, strict=True)):
        bound = scorer.bound(compiled.breaches.healthy)
        if bound is not None and choice < 4 and math.isfinite(edge := (bound.low if choice % 2 else bound.high)):
            value = edge if choice < 2 else math.nextafter(edge, -math.inf if choice % 2 else math.inf)
        ((score, _),) = scorer.update((value,), (step,), EMPTY)
        assert (bound is None) == (score is None)
        if bound is not None and score is not None:
            assert bound.holds(value) != compiled.breaches(score), (value, bound, score)
