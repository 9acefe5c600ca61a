"""How a stream of samples is cut into blocks changes nothing that anybody sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from healthcheck.core.samples import NO_LABELS, Row, Sample
from healthcheck.engine.columns import Moment, step_by_step
from healthcheck.engine.engine import Engine, Evaluation
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.loader import load_text
from tests.unit.engine.random_rules import STEPS, random_series, registry, rule_file, samples

MORE = {
    # Parts and guards on others, families, formulas upon formulas, phases: whatever crosses from series to series.
    "both": {
        "metric": "loss",
        "when": {"all": [{"above": 0.5}, {"metric": "gnorm", "ratio": {"above": 1.2, "window": 6}}]},
    },
    "layers": {
        "metric": "gap",
        "when": {"any": [{"above": 4}, {"metric": "layer[*]", "mean": {"above": 1, "window": 4}}]},
    },
    "steep": {"metric": "slope", "when": {"outside": [-2, 2]}, "only_if": {"twice": {"above": 0}}, "for": "2 of 4"},
    "twice-high": {"metric": "twice", "when": {"above": 2}, "explains": ["both"], "every": 2},
    "of-eval": {"metric": "loss", "phase": "eval", "when": {"above": 0}, "cooldown": 3, "then": ["warn"]},
    "whichever": {"metric": "gnorm", "phase": "any", "when": {"above": 1}, "for": "3s", "explains": ["layers"]},
    "grew": {"metric": "layer[*]", "when": {"delta": {"above": 1}}, "only_if": {"gnorm": {"below": 3}}, "for": 2},
    "gone": {"metric": "gnorm", "when": {"missing": 2}},
    "quiet": {"metric": "layer[*]", "phase": "any", "when": {"stale": {"after": "4s", "first": "3s", "times": 2}}},
    # Costly parts that only learn where a cheap one has failed, and share what they have learnt.
    "flat": {
        "metric": "loss",
        "when": {
            "all": [
                {"slope": {"above": -0.2, "over": 12, "confidence": 0.7}},
                {"slope": {"below": 0.2, "over": 12, "confidence": 0.7}},
                {"ratio": {"below": 3, "to": "first"}},
            ]
        },
    },
    "rising": {
        "metric": "gnorm",
        "when": {"all": [{"slope": {"above": 0, "over": 40, "confidence": 0.6}}, {"above": 0}]},
    },
}
METRICS = {
    "gap": "loss - ewma(gnorm, 5) / mean(loss, 4)",
    "twice": "2 * loss",
    "slope": "twice - last(gap) + gnorm",
    "share": "gnorm / loss",
}


def stream(seed: int, length: int) -> list[Moment]:
    """Evaluations: of a step, of an evaluation with the same names, of two values of one series at once, of none."""
    random = Random(seed)
    moments: list[Moment] = []
    now = 0.0
    for number, at in enumerate(random_series(seed, length), 1):
        if random.random() < 0.3:
            moments.append(Moment(number - 1, (), now + at.pause / 2, at.pause / 2))
        now += at.pause
        taken = samples(number, at)
        if random.random() < 0.15:
            random.shuffle(taken)
        if random.random() < 0.1 and taken:
            taken.append(Sample("loss", number, random.gauss(0, 2)))
        moments.append(Moment(number, taken, now))
        if random.random() < 0.2:
            seen = [Sample(name, number, random.gauss(0, 2), phase="eval") for name in ("loss", "gnorm", "guard")]
            moments.append(Moment(number, seen[: random.randint(1, 3)], now))
        if random.random() < 0.1:
            moments.append(Moment(number, [Sample("gnorm", max(1, number - 2), random.gauss(0, 2))], now))
    return moments


def told(results: Sequence[Evaluation]) -> list[str]:
    """What came out, as text: NaN differs from itself."""
    out = []
    for result in results:
        out += [repr(("alert", result.step, astuple(alert))) for alert in result.alerts]
        out += [repr(("cleared", result.step, a.rule, a.number, a.cleared_step)) for a in result.cleared]
        out += [repr(("change", astuple(t))) for t in result.transitions]
        out += [repr(("plan", p.cause.id, p.spec.name, p.held, p.alert.number)) for p in result.plan]
    return out


def standing(engine: Engine) -> str:
    saved = json.dumps(engine.state_dict(), sort_keys=True, allow_nan=False)
    return saved + repr([(s.cause.id, s.closest, s.held, s.shut, s.samples, sorted(s.firing)) for s in engine.states])


def judged(text: Any, moments: Sequence[Moment], cuts: Sequence[int], recorded: bool = False) -> tuple[list[str], str]:
    engine = Engine(load_rules([text], registry=registry()), watch_transitions=True, recorded=recorded)
    results: list[Evaluation] = []
    for begin, end in pairwise([0, *cuts, len(moments)]):
        if begin < end:
            results += engine.judge(moments[begin:end])
    return told(results), standing(engine)


@settings(
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    text=rule_file(),
    more=st.sets(st.sampled_from(sorted(MORE))),
    seed=st.integers(0, 10**6),
    cuts=st.sets(st.integers(1, STEPS - 1), max_size=8),
    recorded=st.booleans(),
)
def test_blocks_of_any_length_tell_the_same(
    text: dict[str, Any], more: set[str], seed: int, cuts: set[int], recorded: bool
) -> None:
    chosen = {name: dict(MORE[name]) for name in sorted(more)}
    for one in chosen.values():
        if set(one.get("explains", ())) - more:
            del one["explains"]
    text = {**text, "metrics": METRICS, "rules": {**text["rules"], **chosen}}
    moments = stream(seed, STEPS)
    one_by_one, stood = judged(text, moments, range(1, len(moments)), recorded)
    in_blocks, stands = judged(text, moments, sorted(cuts), recorded)
    assert in_blocks == one_by_one
    assert stands == stood


AWAITED = ["guard", "layer[parameter=l1]", "g[m-n]orm", "gap", "twice", "layer", "never"]
"""What a rule may wait for before it applies: plain series, one of a family, a glob, derived metrics, what never comes."""


@pytest.mark.parametrize("seed", range(40))
def test_a_rule_applies_from_the_moment_at_which_what_it_waits_for_comes(seed: int) -> None:
    """Its warm-up begins there, wherever in a block that is; what has nothing to do with it does not matter."""
    random = Random(seed)
    rules = {
        f"waits-{i}": {
            "metric": name,
            "when": {"above": 0},
            "warmup": 3,
            "applies_if": {"metrics": random.sample(AWAITED, random.choice([1, 1, 2]))},
        }
        for i, name in enumerate(["loss", "gnorm", "gap", "twice", "layer[*]"] * 2)
    }
    text = {"version": 1, "external": ["loss", "layer", "gnorm", "guard", "step_time"], "metrics": METRICS}
    begins = {name: random.randrange(STEPS) for name in ("loss", "gnorm", "guard", "layer", "step_time")}
    moments = [
        Moment(step, [one for one in given if one.step > begins[one.metric]], now, silent)
        for step, given, now, silent in stream(seed, STEPS)
    ]
    pack = load_text(json.dumps({**text, "rules": rules}))
    pack.own = False  # what a person names always applies
    cuts = sorted(random.sample(range(1, len(moments)), 6))
    assert judged(pack, moments, cuts) == judged(pack, moments, range(1, len(moments)))


def test_samples_and_rows_are_judged_alike() -> None:
    text = {
        "version": 1,
        "external": ["loss", "gnorm"],
        "metrics": METRICS,
        "rules": {k: MORE[k] for k in ("both", "twice-high")},
    }
    random = Random(3)
    series = (("loss", NO_LABELS, "train"), ("gnorm", NO_LABELS, "train"))
    values = [(random.gauss(1, 1), random.gauss(1, 1)) for _ in range(100)]
    rows = [Moment(step, Row(series, step, given, float(step)), float(step)) for step, given in enumerate(values, 1)]
    lists = [Moment(step, list(row), now) for step, row, now, _ in rows]
    cut = [7, 40, 41]
    assert judged(text, rows, cut) == judged(text, lists, range(1, 100))
    assert judged(text, rows, cut)[0]


@pytest.mark.parametrize("given", [[], [1, 1], [1, 2, 2, 1]])
def test_an_evaluation_is_cut_where_the_step_of_its_samples_changes(given: list[int]) -> None:
    made = [Sample("a", step, 0.0) for step in given]
    parts = [[sample.step for sample in part] for part in step_by_step(made)]
    assert [step for part in parts for step in part] == given
    assert all(len(set(part)) <= 1 for part in parts)
