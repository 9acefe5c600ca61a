"""State saved at any step and restored gives the same alerts as an unbroken run, whatever the rules."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from healthcheck.engine.engine import Engine
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import RuleSet
from tests.unit.engine.random_rules import CONDITIONS, STEPS, Step, random_series, registry, rule_file, samples


def told(engine: Engine, rules: RuleSet, number: int, now: float, at: Step, silent: float) -> list[Any]:
    """One step: a look of the watchdog, then the evaluation. What came out, as plain values."""
    out: list[Any] = []
    for result in (engine.tick(silent, now), engine.evaluate(number, samples(number, at), now)):
        out += [
            (
                "alert",
                a.rule,
                a.fired_step,
                a.episode,
                repr(a.value),
                repr(a.score),
                repr(a.normal),
                a.count,
                a.repeat,
                a.explained_by,
            )
            for a in result.alerts
        ]
        out += [("change", t.rule, t.series, t.step, t.before, t.after, repr(t.score)) for t in result.transitions]
        out += [("plan", p.rule.id, p.spec.name, p.held) for p in result.plan]
    return out


@settings(
    deadline=None,
    derandomize=True,  # the same examples in every run of the suite; set max_examples to look further
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes; the rules in the message are small already
    suppress_health_check=list(HealthCheck),
)
@given(
    text=rule_file(),
    seed=st.integers(0, 10**6),
    cuts=st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=3),
    restarts=st.booleans(),
)
def test_a_run_that_was_resumed_tells_the_same_as_an_unbroken_one(
    text: dict[str, Any], seed: int, cuts: set[int], restarts: bool
) -> None:
    """Whether the clock goes on, as in a rule test, or begins again at zero, as in a live run."""

    def fresh(start: int = 0) -> tuple[Engine, RuleSet]:
        rules = load_rules([text], registry=registry())
        return Engine(rules, watch_transitions=True, start_step=start), rules

    whole, its_rules = fresh()
    broken, rules = fresh()
    now = began = 0.0
    for number, at in enumerate(random_series(seed, STEPS), 1):
        now += at.pause
        expected = told(whole, its_rules, number, now, at, at.pause)
        assert told(broken, rules, number, now - began, at, at.pause) == expected, (
            f"step {number}, resumed after {sorted(cuts)}"
        )
        if number in cuts:
            saved = json.loads(json.dumps(broken.state_dict(), allow_nan=False))
            broken, rules = fresh(number)
            began = now if restarts else began
            assert broken.load_state_dict(saved, now=now - began) == []


def test_every_condition_that_is_built_in_takes_part() -> None:
    """A condition added later must not slip past the property above."""
    comparators = {"above", "below", "at_least", "at_most", "equals", "outside"}
    built_in = {name for name in registry().conditions if registry().owners["conditions", name] == "healthcheck"}
    assert built_in - comparators == {name.split(" ")[0] for name in CONDITIONS} - {"comparators"}
