"""Values that change nothing are noted without a call, parts on other metrics scored when asked: nobody may tell the difference."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine
from healthcheck.rulelang.comparators import Threshold
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import RuleSet

RULES = """
version: 1
external: [a, b, c, guard, x]
metrics: {share: a / (a + b), same: a}
rules:
  nonfinite: {metric: a, when: nonfinite}
  high: {metric: a, when: {above: 3}, for: 3 of 5}
  low: {metric: b, when: {below: 0.2}, for: 2, recover: {above: 0.3}}
  zero: {metric: a, when: {equals: 0}, for: 4}
  between: {metric: c, when: {outside: [0.2, 4]}}
  spike: {metric: a, when: {robust_z: {above: 6, window: 64}}}
  spike-of-log: {metric: b, when: {robust_z: {above: 5, window: 33, log: true, min_ratio: 1.2}}, min_samples: 12}
  clipped: {metric: c, when: {robust_z: {outside: [-4, 4], window: 40}}, outliers: clip}
  reseeded: {metric: c, when: {robust_z: {below: -5, window: 100}}, reseed: 9}
  half: {metric: a, when: {ratio: {below: 0.7, window: 50}}, for: 3}
  grown: {metric: same, when: {ratio: {above: 1.5, to: first}}, min_samples: 4}
  mean: {metric: a, when: {mean: {above: 1.5, window: 20}}}
  mean-low: {metric: b, when: {mean: {below: 0.3, window: 40}}, for: 4}
  back: {metric: a, when: {rebound: {above: 1.05, sigmas: 5, fell: 5%}}, min_samples: 8}
  far-back: {metric: b, when: {rebound: {above: 2, sigmas: 3, smooth: 5}}, for: 2}
  idle: {metric: a, when: {no_improvement: {over: 40, min_rel: 0.01, smooth: 3}}}
  still: {metric: c, when: {unchanged: {over: 5}}}
  constant:
    metric: a
    when: {all: [{ratio: {above: 0.95, window: 20}}, {ratio: {below: 1.05, window: 20}}, {ratio: {above: 0.9, to: first}}]}
    recover: {below: 2}
    for: 4
  climbing: {metric: a, when: {all: [{slope: {above: 0.0001, over: 40, confidence: 0.9}}, {ratio: {above: 1.1, to: first}}]}}
  either: {metric: c, when: {any: [{rebound: {above: 3, sigmas: 4}}, {ratio: {above: 50, to: first}}]}, for: 2 of 4}
  both: {metric: b, when: {all: [{mean: {above: 0.5, window: 12}}, {metric: share, mean: {above: 0.3, window: 10}}]}}
  waiting: {metric: a, when: {all: [{above: 2}, {metric: x, above: 1}]}}
  guarded: {metric: a, when: {robust_z: {above: 5, window: 40}}, only_if: {guard: {above: 0.5}}}
  seldom: {metric: b, when: {mean: {above: 0.8, window: 6}}, every: 10}
"""
STEPS = 400


def rules() -> RuleSet:
    return load_rules([RULES], registry=plugin_host().registry)


def series(noise: random.Random) -> Iterator[list[Sample]]:
    """Mostly quiet, with all that can go wrong."""
    level = {"a": noise.choice([0.5, 2.0]), "b": 1.0, "c": noise.choice([1.0, 0.3]), "guard": 1.0}
    for step in range(1, STEPS + 1):
        batch = []
        for name in level:
            level[name] *= noise.choice([0.995, 1.0, 1.0, 1.0])
            value = level[name] * (1.0 + noise.choice([0.0, 0.01, 0.05]) * noise.gauss(0, 1))
            event = noise.random()
            if event < 0.004:
                value = noise.choice([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e6])
            elif event < 0.012:
                level[name] = noise.choice([0.1, 1.0, 3.0])
            elif event < 0.02:
                continue
            batch.append(Sample(name, step, value))
        if step > STEPS // 2 and noise.random() < 0.3:
            batch.append(Sample("x", step, noise.choice([0.5, 2.0])))
        if noise.random() < 0.01:
            batch += batch[:1]
        yield batch


def told(engine: Engine, step: int, batch: list[Sample]) -> list[Any]:
    result = engine.evaluate(step, batch, float(step))
    alerts = [
        (a.rule, a.fired_step, a.fired_sample, repr(a.value), repr(a.score), repr(a.normal)) for a in result.alerts
    ]
    changes = [(t.rule, t.series, t.step, t.before, t.after, repr(t.score)) for t in result.transitions]
    return [alerts, changes, [a.rule for a in result.cleared]]


def attentive() -> Engine:
    """An engine that judges each value by each rule, and scores what other metrics say each time."""

    class Attentive(Engine):
        def evaluate(self, step: int, samples: Any, now: float) -> Any:
            for state in self.states:
                for side in state.sides:
                    side.settled = False
            return super().evaluate(step, samples, now)

    return Attentive(rules(), watch_transitions=True, every_score=True)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_rules_tell_the_same_as_rules_that_judge_each_value(seed: int) -> None:
    sparing, looking = Engine(rules(), watch_transitions=True), attentive()

    for step, batch in enumerate(series(random.Random(seed)), 1):
        assert told(sparing, step, batch) == told(looking, step, batch), f"step {step}"

    assert sparing.state_dict() == looking.state_dict()


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("above", 0), ("at_least", 2.5), ("below", -1), ("at_most", 0), ("outside", [-1, 2.5]), ("equals", 2.5)],
)
def test_what_a_comparator_publishes_says_what_it_says(kind: str, limit: Any) -> None:
    breaches = Threshold(kind, limit)
    scores = [-7.0, -1.0, 0.0, 0.7, 2.5, 40.0, math.inf, -math.inf]
    near = [math.nextafter(score, end) for score in scores for end in (math.inf, -math.inf)]
    for score in (*scores, *near):
        if breaches.exact:
            assert breaches.healthy.holds(score) != breaches(score), score
        else:
            assert not (breaches.healthy.holds(score) and breaches(score)), score
        for closest in (*scores, *near):
            if breaches.quiet(closest).holds(score):
                assert not breaches(score)
                assert not breaches.closer(score, closest), (score, closest)
            if breaches.direction:
                assert breaches.closer(score, closest) == (breaches.direction * score > breaches.direction * closest)


@pytest.mark.parametrize(
    ("kind", "limit", "nearer", "farther"),
    [
        ("above", 8, 7, 1),
        ("below", 8, 9, 11),
        ("outside", [0, 10], 9, 5),
        ("outside", [0, 10], 1, 5),
        ("outside", [0, 10], -3, 11),
        ("equals", 0, 1e-4, 1e-3),
        ("equals", 0, -1e-4, 1e-3),
    ],
)
def test_of_two_scores_one_is_closer_to_a_breach(kind: str, limit: Any, nearer: float, farther: float) -> None:
    breaches = Threshold(kind, limit)
    assert breaches.closer(nearer, farther)
    assert not breaches.closer(farther, nearer)


def quiet(steps: int) -> Iterator[tuple[int, list[Sample]]]:
    noise = random.Random(0)
    for step in range(1, steps + 1):
        yield step, [Sample("a", step, 1.0 + 0.01 * noise.gauss(0, 1)), Sample("b", step, 1.0)]


def test_values_that_are_only_noted_are_counted() -> None:
    engine = Engine(rules())
    for step, batch in quiet(150):
        engine.evaluate(step, batch, float(step))
        last = batch[0].value

    (high,) = engine.by_id["high"].series.values()

    assert high is not None
    assert (high.n, high.last_step, high.value) == (150, 150, last)
    assert engine.by_id["spike"].samples == 150


def test_a_metric_that_a_rule_waits_for_counts_from_its_first_value() -> None:
    engine = Engine(rules())
    for step, batch in quiet(100):
        engine.evaluate(step, batch, float(step))

    result = engine.evaluate(101, [Sample("a", 101, 2.5), Sample("x", 101, 2.0)], 101.0)

    assert "waiting" in [alert.rule for alert in result.alerts]


def test_a_spike_after_quiet_values_fires_at_its_own_step() -> None:
    engine = Engine(rules())
    for step, batch in quiet(200):
        engine.evaluate(step, batch, float(step))

    fired = {
        a.rule: (a.fired_step, a.fired_sample) for a in engine.evaluate(201, [Sample("a", 201, 9.0)], 201.0).alerts
    }

    assert fired["spike"] == (201, 201)
