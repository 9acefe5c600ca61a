"""The reference pages say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from language import registry

from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.conditions import CONDITIONS
from healthcheck.rulelang.conditions.baselines import widening, widening_mad
from healthcheck.rulelang.loader import load_text
from healthcheck.rulelang.schema import shipped_schema

PAGES = Path(__file__).parents[3] / "docs" / "reference"
RULES = (PAGES / "rule-files.md").read_text(encoding="utf-8")
CONDITION_PAGE = (PAGES / "conditions.md").read_text(encoding="utf-8")


def test_the_example_file_loads() -> None:
    text = re.search(r"```yaml\n(.*?)```", RULES, re.DOTALL)[1].replace("healthcheck:recommended", "")
    rules = load_rules(text.replace("extends: []", ""), registry=registry(), profile="ci")
    assert rules.off == ["data-bound"]


def test_every_key_of_a_rule_is_in_the_table() -> None:
    keys = set(shipped_schema()["definitions"]["rule"]["properties"])
    listed = {key for row in re.findall(r"^\| (`.*?) \|", RULES, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert listed == keys


def test_every_condition_has_a_row_with_an_example_that_compiles() -> None:
    rows = re.findall(r"^\| (`.+?) \| .+? \| (`.+`) \|$", CONDITION_PAGE, re.MULTILINE)
    named = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert {kind.name for kind in CONDITIONS} - named <= {"at_least", "at_most", "equals", "outside"}
    examples = [example for _, cell in rows for example in re.findall(r"`(.+?)`", cell)]
    assert len(examples) >= len(rows) > 15
    for example in examples:
        metric = "time.step[rank=*]" if "outlier" in example else "loss"
        written = load_text(f"when: {example}").data["when"]
        load_rules({"a": {"metric": metric, "when": written}}, registry=registry())


@pytest.mark.parametrize(("factor", "shown"), [(widening, "1.64, 1.19 1.02"), (widening_mad, "5.61, 1.67 1.05")])
def test_the_factors_for_few_samples_are_those_on_the_page(factor, shown) -> None:
    at_8, at_20, at_200 = (f"{factor(n):.2f}" for n in (8, 20, 200))
    assert f"{at_8}, {at_20} {at_200}" == shown
    assert f"{at_8}," in CONDITION_PAGE
    assert f"{at_20} and {at_200}" in CONDITION_PAGE
