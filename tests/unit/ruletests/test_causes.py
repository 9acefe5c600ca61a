"""Rule tests that name a rule, or one cause of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RULES = """\
version: 1
external: [a, b, c]
rules:
  part:
    causes:
      orphan: {kind: fact, metric: a, when: {above: 0}, severity: error, then: [warn, stop]}
      left-out: {metric: b, when: {above: 0}, then: [warn, evidence]}
      frozen: {kind: trend, metric: c, when: {above: 0}, message: "frozen at step {step}"}
"""

SERIES = 'series: {a: "0 x5, 1 x5", b: "0 x3, 1 x4, 0 x3", c: "0 x1, 1 x9"}\ncontinue_after_stop: true\n'

FITTING = [
    "expect: [{rule: part, fires: 2, severity: error, then: [warn, evidence, stop], also: [left-out, frozen]}]",
    "expect: [{rule: part.frozen, fires: 2, severity: warning, message: frozen at step 2},"
    " {rule: part.left-out, fires: 4, clears: 8, then: evidence}, {rule: part.orphan, fires: 6, then: stop}]",
    "expect: [part, {rule: part.orphan, fires: 6}]",
    "only: [part.frozen]\nexpect: [{rule: part, fires: 2}]",
    "only: [part.frozen]\nexpect: [{rule: part.frozen, fires: 2}]",
    "off: [part.orphan, part.frozen]\nresume_at: 5\nexpect: [{rule: part.left-out, fires: 4, clears: 8}]",
    "resume_at: [3, 5]\nexpect: [{rule: part, fires: 2, also: [left-out, frozen], then: [warn, evidence, stop]}]",
]


@pytest.mark.parametrize("expected", FITTING)
def test_an_expectation_names_a_rule_or_what_one_cause_found(run: Callable[..., Any], expected: str) -> None:
    assert run(SERIES + expected, rules=RULES).text == ""


WRONG = [
    ("expect: [{rule: part, fires: 2, also: [frozen]}]", "`also`: expected frozen, was left-out, frozen"),
    ("expect: [{rule: part.orphan, fires: 5}]", "part.orphan: expected to fire at step 5, fired at 6"),
    ("expect: [{rule: part.orphan, fires: 6}]", "part.left-out: fired at step 4, and it is not in `expect`"),
    ("expect: [{rule: part.left-out, fires: 4, clears: 9}]", "expected to clear at step 9, cleared at 8"),
    ("expect: none", "part: fired at step 2, and no alert was expected"),
]


@pytest.mark.parametrize(("expected", "said"), WRONG)
def test_what_came_otherwise_is_said_of_the_cause(run: Callable[..., Any], expected: str, said: str) -> None:
    assert said in run(SERIES + expected, rules=RULES).text


def test_the_evidence_of_a_difference_is_that_of_its_cause(run: Callable[..., Any]) -> None:
    text = run(SERIES + "expect: [{rule: part.orphan, fires: 5}, part.left-out, part.frozen]", rules=RULES).text
    assert "firing" in text
    assert "`when: {above: 0}` at team.yaml:6" in text


def test_coverage_counts_causes(run: Callable[..., Any]) -> None:
    result = run('series: {a: "1 x2", b: "0 x2"}\nexpect: [part]', rules=RULES)
    assert (result.fired, result.silent) == (("part.orphan",), ("part.left-out",))
