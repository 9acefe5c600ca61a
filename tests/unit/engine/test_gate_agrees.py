"""An update is let through or held back by a bound that older samples draw; the engine judges the sample afterwards.

Both must say the same of every sample, to the last bit: nothing is judged twice, so nobody would notice.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import Labels, Sample
from healthcheck.engine.engine import Engine
from healthcheck.extend.registry import Registry
from healthcheck.instrument.gate import GatingRules, why_not_gateable
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import Mute, Rule

STEPS = 70


@cache
def registry() -> Registry:
    return plugin_host().registry


limit = st.sampled_from([0.5, 1.0, 1.5, 3.0])
upward = st.builds(lambda kind, v: {kind: v}, st.sampled_from(["above", "at_least"]), limit)
downward = st.builds(lambda kind, v: {kind: -v}, st.sampled_from(["below", "at_most"]), limit)
both = st.builds(lambda v: {"outside": [-v, v]}, limit)
window = st.integers(4, 20)


def windowed(name: str, compared: st.SearchStrategy[Any], **extra: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    options = st.fixed_dictionaries({"window": window, **extra})
    return st.builds(lambda test, more: {name: {**test, **more}}, compared, options)


GATEABLE: dict[str, st.SearchStrategy[Any]] = {
    "threshold": st.one_of(
        st.builds(lambda kind, v: {kind: v}, st.sampled_from(["above", "at_least", "below", "at_most"]), limit),
        st.just({"outside": [0.5, 3.0]}),
    ),
    "nonfinite": st.just("nonfinite"),
    "zscore": windowed("zscore", st.one_of(upward, downward, both)),
    "robust_z": windowed("robust_z", st.one_of(upward, downward, both), min_ratio=st.sampled_from([1.0, 1.2])),
    "robust_z of logs": windowed("robust_z", upward, log=st.just(True), min_ratio=st.sampled_from([1.0, 1.2])),
    "ratio": windowed(
        "ratio",
        st.one_of(upward, st.just({"below": 0.7}), st.just({"outside": [0.6, 1.6]})),
        to=st.sampled_from(["median", "mean", "ewma", "first"]),
    ),
    "ratio to best": windowed("ratio", st.just({"above": 1.5}), to=st.just("best")),
}


@st.composite
def rule(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"metric": "loss", "when": draw(GATEABLE[kind]), "then": ["skip_update"]}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "every": st.integers(2, 4),
        "warmup": st.sampled_from([5, 20]),
        "min_samples": st.integers(2, 4),
        "recover": st.just({"below": 0.5}),
        "cooldown": st.just(3),
    }
    if kind not in ("threshold", "nonfinite"):
        optional["outliers"] = st.sampled_from(["include", "exclude", "clip"])
        optional["reseed"] = st.integers(2, 3)
    for key, values in optional.items():
        if draw(st.booleans()):
            made[key] = draw(values)
    return made


def values(draw: random.Random, engine: Engine, labels: Labels, step: int) -> float:
    """The next value of a series: usual ones, jumps, what is no number, and values right at a bound or beyond it."""
    event = draw.random()
    if event < 0.06:
        return draw.choice([math.nan, math.inf, -math.inf, 0.0, -1.0])
    if event < 0.4:
        series = engine.states[0].series.get(labels)
        bound = None if series is None else series.scorer.bound(series.breaches.healthy)
        edges = [] if bound is None else [edge for edge in (bound.low, bound.high) if math.isfinite(edge)]
        if edges:
            edge = draw.choice(edges)
            return draw.choice([edge, math.nextafter(edge, math.inf), math.nextafter(edge, -math.inf)])
    return draw.choice([1.0, 1.0, 1.0, 2.0, 5.0]) * (1 + 0.05 * draw.gauss(0, 1))


@pytest.mark.parametrize("kind", GATEABLE)
@settings(
    max_examples=40, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)
@given(data=st.data(), seed=st.integers(0, 10**9), owned=st.booleans(), cut=st.integers(1, STEPS))
def test_the_gate_decides_as_the_engine_will_judge(
    kind: str, data: st.DataObject, seed: int, owned: bool, cut: int
) -> None:
    """With an owner of non-finite samples beside the rule or without, across a resume, for several series."""
    written = {"judged": data.draw(rule(kind))}
    if owned:
        written["owner"] = {"metric": "loss", "when": "nonfinite", "then": ["warn"]}
    text = {"version": 1, "rules": written}

    def fresh(start: int) -> Engine:
        return Engine(load_rules([text], registry=registry()), start_step=start)

    engine, draw = fresh(0), random.Random(seed)
    gate = GatingRules(engine)
    assert [r.id for r in gate.rules] == ["judged"]
    for step in range(1, STEPS + 1):
        present = [labels for labels in ((), (("optimizer", "1"),)) if draw.random() > 0.1]
        samples = [Sample("loss", step, values(draw, engine, labels, step), labels) for labels in present]
        held = {s.labels: any(limit.breached(s.value) for _, limit in gate.limits([s])) for s in samples}
        streaks = {labels: s.streak for labels, s in engine.by_id["judged"].series.items() if s is not None}

        engine.evaluate(step, samples, float(step))

        for sample in samples:
            series = engine.by_id["judged"].series[sample.labels]
            assert series is not None
            breached = series.streak == streaks.get(sample.labels, 0) + 1
            assert held[sample.labels] == breached, (step, sample, series.state)
        if step == cut:
            saved = engine.state_dict()
            engine = fresh(step)
            assert engine.load_state_dict(saved, now=float(step)) == []
            gate = GatingRules(engine)


def rule_of(**keys: Any) -> Rule:
    text = {"version": 1, "rules": {"r": {"metric": "loss", "when": {"above": 5}, "then": ["stop"], **keys}}}
    return load_rules([text], registry=registry()).cause("r")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, ""),
        ({"then": ["warn"]}, "it neither skips an update nor stops"),
        ({"mode": "observe"}, "it only observes"),
        ({"metric": "lr"}, "lr is not known before the update"),
        ({"phase": "eval"}, "loss is not known before the update"),
        ({"for": 2}, "it waits for 2 samples"),
        ({"then": [{"stop": {"after": 2}}]}, "its action waits for a repetition"),
        ({"only_if": {"lr": {"above": 0}}}, "its guards are not known before the update"),
        ({"only_if": {"amp.skipped": 0}}, ""),
        ({"warmup": "5 samples"}, "its warm-up does not count steps"),
        ({"when": {"equals": 0}}, "`equals` draws no bound that the device could compare with"),
        ({"when": {"mean": {"above": 3}}}, "`mean` draws no bound that the device could compare with"),
        (
            {"when": {"nonfinite": {"count": 2, "window": 5}}},
            "`nonfinite` draws no bound that the device could compare with",
        ),
        ({"when": {"ratio": {"below": 0.1}}}, ""),
    ],
    ids=str,
)
def test_a_rule_that_cannot_hold_back_its_update_says_why(keys: dict[str, Any], why: str) -> None:
    assert why_not_gateable(rule_of(**keys)) == why


def test_a_muted_rule_asks_nothing_while_it_is_muted() -> None:
    rules = load_rules(
        [{"version": 1, "rules": {"r": {"metric": "loss", "when": {"above": 5}, "then": ["stop"]}}}],
        registry=registry(),
    )
    engine = Engine(rules)
    engine.mutes.append(Mute("r", "known", first=3, last=4))
    gate = GatingRules(engine)
    assert [len(gate.limits([Sample("loss", step, 9.0)])) for step in range(1, 7)] == [1, 1, 0, 0, 1, 1]


def test_what_a_gate_has_worked_out_is_worked_out_anew_after_a_resume() -> None:
    text = {"version": 1, "rules": {"r": {"metric": "loss", "when": {"above": 5}, "then": ["stop"], "warmup": 3}}}
    engine = Engine(load_rules([text], registry=registry()))
    gate = GatingRules(engine)
    for step in range(1, 6):
        assert bool(gate.limits([Sample("loss", step, 9.0)])) == (step > 3)
        engine.evaluate(step, [Sample("loss", step, 1.0)], float(step))
    young = Engine(load_rules([text], registry=registry()), start_step=5)
    young.evaluate(6, [Sample("loss", 6, 1.0)], 1.0)
    engine.load_state_dict(young.state_dict(), now=1.0)
    assert [bool(gate.limits([Sample("loss", step, 9.0)])) for step in (7, 8, 9)] == [False, False, True]
