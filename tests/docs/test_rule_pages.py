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
THEMES = ("numerics", "optimisation", "memory", "throughput", "data", "eval", "rl")
PACK = {
    rule: body for theme in THEMES for rule, body in load_file(ROOT / "rules" / f"{theme}.yaml").data["rules"].items()
}
"""Every shipped rule where it is written; the other packs only change keys."""
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

    rule: str
    series: tuple[tuple[str, str], ...]
    text: str
    fires: bool
    step: int | None

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def page(rule: str) -> str:
    return (PAGES / f"{rule}.md").read_text(encoding="utf-8")


@cache
def examples() -> list[Example]:
    found = []
    for rule in PACK:
        if not (PAGES / f"{rule}.md").exists():
            continue
        for match in EXAMPLE.finditer(page(rule)):
            step = int(match["step"]) if match["step"] else None
            series = tuple(SERIES.findall(match["series"]))
            found.append(Example(rule, series, match[0], match["expected"] != "ok", step))
    return found


@pytest.fixture(scope="module")
def pack() -> RuleSet:
    """Every rule switched on; conditions are those of ``recommended``."""
    return load_rules_for(host=plugin_host(), rules="healthcheck:strict")


def test_every_rule_has_a_page_with_the_usual_headings() -> None:
    for rule, body in PACK.items():
        text = page(rule)
        assert text.startswith(f"# {rule}\n")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS, rule
        assert body["docs"] == f"rules/{rule}"


def test_every_page_shows_the_rule_firing_and_silent() -> None:
    shown = {(example.rule, example.fires) for example in examples()}
    assert [rule for rule in PACK if not {(rule, True), (rule, False)} <= shown] == []


@pytest.mark.parametrize("example", examples(), ids=str)
def test_an_example_does_what_the_page_says(example: Example, pack: RuleSet) -> None:
    assert example.series, "an example needs a series"
    assert len(example.series) == example.text.count('"') // 2
    sources = [Source(name, ("series", name), tuple(parse_series(text))) for name, text in example.series]
    test = RuleTest(example.rule, (), 0, {0: sources}, continue_after_stop=True)
    played = play(test, lambda _: replace(pack, derived=deepcopy(pack.derived)), {})
    fired = [e.alert.fired_step for e in played.episodes if e.alert.rule == example.rule]
    assert bool(fired) == example.fires, f"fired at {fired}"
    if example.step is not None:
        assert fired[0] == example.step


def test_every_rule_says_what_to_try_and_what_it_is_about(pack: RuleSet) -> None:
    compiled = {rule.id: rule for rule in pack.causes}
    assert sorted(compiled) == sorted(PACK)
    assert [r.id for r in pack.causes if not r.hint or not r.tags or r.message is None] == []


def test_only_the_non_finite_rules_may_stop_a_run() -> None:
    recommended = load_rules_for(host=plugin_host(), rules="healthcheck:recommended")
    assert {rule.id for rule in recommended.causes if rule.may_stop} == {"loss-not-finite", "grads-not-finite"}


def test_no_page_is_left_of_a_rule_that_does_not_exist() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} == set(PACK)
