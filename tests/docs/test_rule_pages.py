"""Every shipped rule has a page, and the examples on it are true: they run through the engine."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import RuleSet
from healthcheck.ruletests.loading import RuleTest, Source
from healthcheck.ruletests.notation import parse_series
from healthcheck.ruletests.play import play

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "rules"
PACKS = ("core", "wiring", "curves", "performance", "gan", "rl", "finetune", "moe", "ranks", "preview")
RULES = {
    rule: body for pack in PACKS for rule, body in load_file(ROOT / "rules" / f"{pack}.yaml").data["rules"].items()
}
"""Every shipped rule where it is written; the other packs only change keys."""
CAUSES = [f"{rule}.{cause}" if cause else rule for rule, body in RULES.items() for cause in body.get("causes", [""])]
HEADINGS = [
    "What it checks",
    "Why it matters",
    "Example that fires",
    "Example that does not",
    "What to do",
    "Options",
    "Known false positives",
]
EXAMPLE = re.compile(r"^(?P<series>.+?)\s*-> (?P<expected>fires(?: at step (?P<step>\d+))?|ok)$", re.MULTILINE)
SERIES = re.compile(r'([\w.]+(?:\[[^\]]*\])?): "([^"]*)"')


@dataclass(frozen=True)
class Example:
    """One line of an example block."""

    cause: str
    series: tuple[tuple[str, str], ...]
    text: str
    fires: bool
    step: int | None

    def __str__(self) -> str:
        return f"{self.cause}: {self.text}"


def page(rule: str) -> str:
    return (PAGES / f"{rule}.md").read_text(encoding="utf-8")


def part(cause: str) -> str:
    """What a page says of one cause: the section of its name, the whole page where the rule is its only one."""
    rule, _, name = cause.partition(".")
    if not name:
        return page(rule)
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page(rule), re.MULTILINE | re.DOTALL)
    assert found, f"{rule}.md has no section on {name}"
    return found[1]


@cache
def examples() -> list[Example]:
    found = []
    for cause in CAUSES:
        for match in EXAMPLE.finditer(part(cause)):
            step = int(match["step"]) if match["step"] else None
            series = tuple(SERIES.findall(match["series"]))
            found.append(Example(cause, series, match[0], match["expected"] != "ok", step))
    return found


@pytest.fixture(scope="module")
def pack() -> RuleSet:
    """Every rule switched on; a pack that is named applies without being asked whether the run is one of its kind."""
    named = {"version": 1, "extends": ["healthcheck:strict", *(f"healthcheck:{pack}" for pack in PACKS)]}
    return load_rules_for(host=plugin_host(), rules=named)


def test_every_cause_has_its_place_on_a_page_with_the_usual_headings() -> None:
    for cause in CAUSES:
        rule, _, name = cause.partition(".")
        level = "###" if name else "##"
        assert page(rule).startswith(f"# {rule}\n")
        assert re.findall(rf"^{level} (.+)$", part(cause), re.MULTILINE) == HEADINGS, cause
        assert RULES[rule]["docs"] == f"rules/{rule}"


def test_a_page_has_a_section_for_each_cause_in_the_order_of_the_pack() -> None:
    for rule, body in RULES.items():
        if "causes" in body:
            assert re.findall(r"^## (.+)$", page(rule), re.MULTILINE) == list(body["causes"])


def test_every_page_shows_each_cause_firing_and_silent() -> None:
    shown = {(example.cause, example.fires) for example in examples()}
    assert [cause for cause in CAUSES if not {(cause, True), (cause, False)} <= shown] == []


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_does_what_the_page_says(example: Example, pack: RuleSet) -> None:
    assert example.series, "an example needs a series"
    assert len(example.series) == example.text.count('"') // 2
    sources = [Source(name, ("series", name), tuple(parse_series(text))) for name, text in example.series]
    test = RuleTest(example.cause, (), 0, {0: sources}, continue_after_stop=True)
    played = play(test, lambda _: replace(pack, derived=deepcopy(pack.derived)), {})
    rule, _, cause = example.cause.partition(".")
    alerts = [e.alert for e in played.episodes if e.alert.rule == rule]
    fired = [alert.cause_step for alert in alerts if alert.cause == cause]
    fired += [other.fired_step for alert in alerts for other in alert.also if other.cause == cause]
    assert bool(fired) == example.fires, f"fired at {fired}"
    if example.step is not None:
        assert min(fired) == example.step


def test_every_cause_says_what_to_try_and_what_it_is_about(pack: RuleSet) -> None:
    compiled = {cause.id: cause for cause in pack.causes}
    assert sorted(compiled) == sorted(CAUSES)
    assert [c.id for c in pack.causes if not c.hint or not c.tags or c.message is None or not c.basis] == []


def test_only_the_non_finite_rules_may_stop_a_run() -> None:
    recommended = load_rules_for(host=plugin_host(), rules="healthcheck:recommended")
    stopping = {cause.id for cause in recommended.causes if cause.may_stop}
    assert stopping == {"loss-not-finite", "grads-not-finite.in-one-step"}


def test_no_page_is_left_of_a_rule_that_does_not_exist() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(RULES)


def test_the_table_of_former_names_leads_to_causes_that_exist() -> None:
    table = (ROOT / "docs" / "explanation" / "rules-as-causes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[\w-]+` \| \[([\w.-]+)\]", table, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 100
    assert set(rows) <= set(CAUSES)
