"""A run that goes on: what each rule keeps, and what becomes of a state that cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from healthcheck.core.errors import StateError
from healthcheck.core.samples import Sample

RULES = """
external: [a, b]
metrics: {gap: "a - mean(b, 3)"}
rules:
  spike: {metric: a, when: {robust_z: {above: 8, window: 20}}}
  level: {metric: a, when: {mean: {above: 5, window: 4}}, warmup: 3}
  wide: {metric: gap, when: {above: 100}}
"""


def halfway(bench: Callable[..., Any]) -> dict[str, Any]:
    """The saved state after twelve quiet steps."""
    first = bench(RULES)
    for step in range(1, 13):
        first.step(step, a=1.0 + step % 3 / 10, b=1.0)
    saved: dict[str, Any] = json.loads(json.dumps(first.engine.state_dict(), allow_nan=False))
    return saved


def test_a_rule_whose_state_cannot_be_read_starts_fresh_and_the_others_go_on(bench: Callable[..., Any]) -> None:
    saved = halfway(bench)
    saved["causes"]["spike"]["series"][0]["scorer"] = {"window": None}

    again = bench(RULES, start_step=12)
    told = again.engine.load_state_dict(saved)

    assert len(told) == 1
    assert told[0].startswith("spike starts fresh: its saved state cannot be read (TypeError: ")
    assert again.engine.by_id["spike"].samples == 0
    assert again.engine.by_id["level"].samples == 12
    again.step(13, a=50.0)
    assert again.fired("level") == [13]
    assert again.fired("spike") == []  # it has no baseline any more


@pytest.mark.parametrize("broken", [None, 7, {}, {"fingerprint": None}, "text"])
def test_whatever_stands_where_a_rule_was_saved_only_that_rule_is_lost(
    bench: Callable[..., Any], broken: object
) -> None:
    saved = halfway(bench)
    saved["causes"]["spike"] = broken

    again = bench(RULES, start_step=12)
    told = again.engine.load_state_dict(saved)

    assert [sentence.split()[0] for sentence in told] == ["spike"]
    assert again.engine.by_id["level"].samples == 12


def test_half_a_state_leaves_nothing_behind(bench: Callable[..., Any]) -> None:
    text = 'external: [a]\nrules: {each: {metric: "a[*]", when: {above: 5}}}'
    first = bench(text)
    for step in (1, 2):
        first.family(step, "a", {"p": 1.0, "q": 1.0})
    saved = first.engine.state_dict()
    saved["causes"]["each"]["series"][1]["labels"] = 3

    again = bench(text, start_step=2)
    again.engine.load_state_dict(saved)

    assert again.engine.by_id["each"].series == {}


def test_a_rule_that_starts_fresh_warms_up_from_the_resume_on(bench: Callable[..., Any]) -> None:
    saved = halfway(bench)
    saved["causes"]["level"]["fingerprint"] = "another condition"

    again = bench(RULES)
    assert again.engine.load_state_dict(saved) == ["level starts fresh: its metric or condition changed"]
    again.series("a", [50.0] * 6, start=13)

    # Eight samples are wanted, at most the window of four; the three steps of warm-up end after step 15.
    assert again.fired("level") == [16]


def test_a_derived_metric_whose_memory_cannot_be_read_starts_fresh(bench: Callable[..., Any]) -> None:
    saved = halfway(bench)
    saved["derived"]["gap"]["state"] = [["x"]]

    again = bench(RULES, start_step=12)
    told = again.engine.load_state_dict(saved)

    assert len(told) == 1
    assert told[0].startswith("gap starts fresh: its saved state cannot be read")
    again.step(13, a=200.0, b=1.0)
    assert again.fired("wide") == [13]


def test_a_state_of_another_format_is_refused_as_a_whole(bench: Callable[..., Any]) -> None:
    with pytest.raises(StateError, match="version 2, this is 4"):
        bench(RULES).engine.load_state_dict({"version": 2, "step": 3, "rules": {}})


# -- the clock begins again at zero -----------------------------------------------------

HELD = "external: [a]\nrules: {high: {metric: a, when: {above: 5}, for: 30s}}"


def test_a_hold_in_seconds_goes_on_where_it_stood(bench: Callable[..., Any]) -> None:
    first = bench(HELD)
    first.step(1, now=1000.0, a=9.0)
    first.step(2, now=1020.0, a=9.0)

    again = bench(HELD, start_step=2)
    assert again.engine.load_state_dict(first.engine.state_dict()) == []
    again.step(3, now=5.0, a=9.0)  # 25 seconds
    assert again.fired("high") == []
    again.step(4, now=10.0, a=9.0)  # 30 seconds
    assert again.fired("high") == [4]


def test_a_warmup_in_seconds_is_not_begun_again(bench: Callable[..., Any]) -> None:
    text = "external: [a]\nrules: {high: {metric: a, when: {above: 5}, warmup: 60s}}"
    first = bench(text)
    first.step(1, now=500.0, a=1.0)
    first.step(2, now=550.0, a=1.0)

    again = bench(text, start_step=2)
    again.engine.load_state_dict(first.engine.state_dict())
    again.step(3, now=9.0, a=9.0)  # 59 seconds since the first sample
    assert again.fired("high") == []
    again.step(4, now=10.0, a=9.0)
    assert again.fired("high") == [4]


def test_silence_before_the_stop_counts_and_the_pause_does_not(bench: Callable[..., Any]) -> None:
    text = "external: [a]\nrules: {quiet: {metric: a, when: {stale: 60s}}}"
    first = bench(text)
    first.engine.evaluate(1, [Sample("a", 1, 1.0)], 100.0)
    first.engine.tick(40.0, 140.0)

    again = bench(text, start_step=1)
    again.engine.load_state_dict(first.engine.state_dict())
    assert again.engine.tick(19.0, 19.0).alerts == []
    assert [alert.rule for alert in again.engine.tick(20.0, 20.0).alerts] == ["quiet"]


def test_a_clock_that_goes_on_is_told_at_the_resume(bench: Callable[..., Any]) -> None:
    first = bench(HELD)
    first.step(1, now=1000.0, a=9.0)

    again = bench(HELD, start_step=1)
    again.engine.load_state_dict(first.engine.state_dict(), now=1000.0)
    again.step(2, now=1029.0, a=9.0)
    assert again.fired("high") == []
    again.step(3, now=1030.0, a=9.0)
    assert again.fired("high") == [3]
