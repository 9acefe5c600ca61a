"""What we suggest for a ``threshold`` in a rule is a rule that loads, and that keeps the condition it had."""

from __future__ import annotations

import re

import pytest
from language import registry

from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.loader import load_text


@pytest.mark.parametrize(
    ("rule", "condition"),
    [
        ("{metric: loss, threshold: 9}", "above"),
        ("{metric: loss, threshold: 0.5}", "above"),
        ("{metric: loss, threshold: high}", "above"),
        ("{metric: loss, when: {robust_z: {window: 50}}, threshold: 9}", "robust_z"),
        ("{metric: loss, when: robust_z, threshold: 9}", "robust_z"),
    ],
)
def test_what_is_suggested_loads(rule: str, condition: str) -> None:
    rules = f"version: 1\nrules:\n  one: {rule}\n"
    problems = load_all([load_text(rules)], registry=registry()).problems
    hint = next(p.suggestion for p in problems if p.slug == "unknown-key")
    written = re.search(r"`when: (.*)`", hint)
    assert written is not None, hint
    kept = re.sub(r"(, )?when: .*?(?=, threshold)", "", rule)
    mended = re.sub(r"threshold: \w+(\.\d+)?", f"when: {written[1]}", kept)
    again = load_all([load_text(f"version: 1\nrules:\n  one: {mended}\n")], registry=registry())
    assert not again.errors, (mended, list(map(str, again.errors)))
    assert again.ruleset.causes[0].condition.name in (condition, "threshold")


def test_a_threshold_for_a_rule_of_a_pack_is_not_answered_with_another_condition() -> None:
    problems = load_all([load_text("version: 1\nrules:\n  loss-spike: {threshold: 9}\n")], registry=registry()).problems
    hint = next(p.suggestion for p in problems if p.slug == "unknown-key")
    assert "above: 9" not in hint
    assert "healthcheck explain loss-spike" in hint


def test_beside_a_limit_the_key_is_superfluous() -> None:
    text = "version: 1\nrules:\n  one: {metric: loss, when: {robust_z: {above: 8}}, threshold: 9}\n"
    (problem,) = load_all([load_text(text)], registry=registry()).problems
    assert problem.suggestion == "the condition has a limit of its own: delete this key"
