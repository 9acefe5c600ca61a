"""``healthcheck explain``: the manual of whatever a rule file can name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from healthcheck.cli import main

Says = Callable[..., str]


@pytest.fixture
def says(here: Path, capsys: pytest.CaptureFixture[str]) -> Says:
    def call(*argv: str) -> str:
        capsys.readouterr()
        assert main(["explain", *argv]) == 0
        return str(capsys.readouterr().out)

    return call


def test_an_action_is_told_with_its_options_and_how_a_rule_writes_it(says: Says) -> None:
    text = says("evidence")
    assert text.startswith("action evidence (observe)\n")
    assert "    batch        statistics (default)" in text
    assert "then: [evidence]" in text
    assert "batch" in json.loads(says("evidence", "--format", "json"))["properties"]


def test_a_metric_is_told_with_its_family_and_the_rules_that_judge_it(says: Says) -> None:
    text = says("grad_norm")
    assert "metric grad_norm\n" in text
    assert "metric grad_norm[*]\n" in text
    assert "rules here: grads-not-finite" in text
    assert {facts["metric"] for facts in json.loads(says("grad_norm", "--format", "json"))} == {
        "grad_norm",
        "grad_norm[*]",
    }


def test_a_rule_asks_in_the_same_words_as_in_plan(says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    (asks,) = [line.removeprefix("asks").strip() for line in says("hang").splitlines() if "asks  " in line]
    capsys.readouterr()
    assert main(["plan", "--format", "json"]) == 0
    assert asks in capsys.readouterr().out


def test_what_is_nothing_is_answered(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "evidenc"]) == 4
    assert 'did you mean "evidence"?' in capsys.readouterr().err
    assert main(["explain", "qqqqqqqqqq"]) == 4
    assert "`healthcheck explain` lists the rules here" in capsys.readouterr().err


OWN = """
version: 1
external: [kl]
rules:
  loss-spike: {metric: kl, when: {above: 0.2}, for: 3 of 5}
"""
OVERRIDDEN = """
version: 1
extends: [healthcheck:recommended]
rules:
  spike: {for: 3 of 5}
"""


def test_a_rule_of_ones_own_with_a_name_of_ours_does_not_get_our_page(says: Says, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN)
    text = says("loss-spike", "--rules", "own.yaml")
    assert "## What it checks" not in text
    assert "kl above 0.2, in 3 of 5 samples" in text
    assert json.loads(says("loss-spike", "--rules", "own.yaml", "--format", "json"))["page"] is None


def test_a_rule_of_ones_own_over_our_pack_does_not_get_our_page_either(says: Says, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(OWN.replace("external", "extends: [healthcheck:recommended]\nexternal"))
    assert "## What it checks" not in says("loss-spike", "--rules", "own.yaml")


def test_our_rule_with_other_settings_keeps_its_page(says: Says, tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(OVERRIDDEN)
    text = says("spike", "--rules", "set.yaml")
    assert "## What it checks" in text
    assert "in 3 of 5 samples" in text
