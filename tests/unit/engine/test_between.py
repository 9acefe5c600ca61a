"""Values of steps that nobody watched are judged by the bound that is published, and leave no trace unless they break it."""

from __future__ import annotations

import json
import math

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import BETWEEN, Sample
from healthcheck.engine.columns import Moment
from healthcheck.engine.engine import Engine
from healthcheck.rulelang.compile import load_rules

RULES = """
version: 1
rules:
  spike: {metric: grad_norm, when: {robust_z: {above: 8, window: 50}}, warmup: 20}
  twice: {metric: grad_norm, when: {above: 100}, for: 2}
  finite: {metric: grad_norm, when: nonfinite}
"""


def engine() -> Engine:
    """After thirty healthy steps."""
    made = Engine(load_rules([RULES], registry=plugin_host().registry))
    for step in range(1, 31):
        assert not made.evaluate(step, [Sample("grad_norm", step, 1.0 + 0.01 * (step % 5))], float(step))
    return made


def between(step: int, value: float) -> Moment:
    return Moment(step, [Sample("grad_norm", step, value, phase=BETWEEN)], float(step))


def watched(step: int, value: float = 1.0) -> Moment:
    return Moment(step, [Sample("grad_norm", step, value)], float(step))


def test_a_value_within_all_bounds_changes_nothing_at_all() -> None:
    with_it, without = engine(), engine()
    assert list(with_it.judge([between(37, 1.03), watched(40)])) == []
    without.judge([watched(40)])
    assert json.dumps(with_it.state_dict()) == json.dumps(without.state_dict())


def test_a_spike_of_a_single_step_fires_at_its_own_step() -> None:
    found = engine().judge([between(37, 50.0), watched(40)])
    assert [(a.rule, a.fired_step) for one in found for a in one.alerts] == [("spike", 37)]


def test_a_value_that_breaks_a_bound_counts_as_one_sample_like_any_other() -> None:
    judged = engine()
    found = [*judged.judge([between(37, 500.0)]), *judged.judge([watched(40, 500.0)])]
    alerts = [(a.rule, a.fired_step) for one in found for a in one.alerts]
    assert ("spike", 37) in alerts
    assert ("twice", 40) in alerts


def test_a_value_that_is_not_finite_is_found() -> None:
    found = engine().judge([watched(31), between(37, math.nan), watched(40)])
    assert ("finite", 37) in [(a.rule, a.fired_step) for one in found for a in one.alerts]


def test_it_does_not_matter_how_a_stream_with_such_values_is_cut_into_blocks() -> None:
    stream = [
        watched(31),
        between(33, 1.02),
        watched(40),
        between(47, 60.0),
        watched(50),
        between(52, 1.0),
        watched(60),
    ]
    whole, single = engine(), engine()
    once = [(a.rule, a.fired_step) for one in whole.judge(stream) for a in one.alerts]
    each = [(a.rule, a.fired_step) for moment in stream for one in single.judge([moment]) for a in one.alerts]
    assert once == each == [("spike", 47)]
    assert json.dumps(whole.state_dict()) == json.dumps(single.state_dict())
