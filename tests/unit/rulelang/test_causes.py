"""Causes in rule files: defaults, merging by name, and how they are called from outside."""

from __future__ import annotations

from typing import Any

import pytest
from language import load

from healthcheck.core.alerts import Kind, Severity
from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.rule import Hold, Mute, RuleSet

BASE = """version: 1
external: [a, b, c]
rules:
  part:
    severity: warning
    tags: [weights]
    for: 2
    cooldown: 50
    causes:
      orphan: {kind: fact, metric: a, when: {above: 0}, severity: error}
      frozen: {kind: trend, metric: b, when: {above: 0}, for: 5}
  single: {metric: c, when: {above: 1}}
"""


def nearer(known: Any, text: str, **choice: Any) -> RuleSet:
    return load(known, BASE, f"version: 1\n{text}\n", **choice)


def test_keys_of_the_rule_are_defaults_of_its_causes(known) -> None:
    rules = load(known, BASE)
    orphan, frozen = rules["part"].causes
    assert (orphan.id, orphan.rule, orphan.name) == ("part.orphan", "part", "orphan")
    assert (orphan.severity, frozen.severity) == (Severity.ERROR, Severity.WARNING)
    assert (orphan.hold, frozen.hold) == (Hold(2, 2), Hold(5, 5))
    assert (orphan.kind, frozen.kind) == (Kind.FACT, Kind.TREND)
    assert rules["part"].tags == ("weights",)
    assert rules["part"].cooldown == orphan.cooldown == 50


def test_a_rule_without_causes_is_its_own_only_one(known) -> None:
    (only,) = load(known, BASE)["single"].causes
    assert (only.id, only.rule, only.name, only.kind) == ("single", "single", "", Kind.MEASURE)


def test_causes_are_merged_by_name(known) -> None:
    rules = nearer(known, "rules: {part: {causes: {frozen: {for: 9}, extra: {metric: c, when: {above: 2}}}}}")
    assert [c.name for c in rules["part"].causes] == ["orphan", "extra", "frozen"], "a measure goes before a trend"
    assert rules.cause("part.frozen").hold == Hold(9, 9)
    assert rules.cause("part.frozen").when == {"above": 0}
    assert rules.cause("part.extra").hold == Hold(2, 2)


def test_null_for_causes_drops_those_that_are_inherited(known) -> None:
    rules = nearer(known, "rules: {part: {causes: null, metric: c, when: {above: 3}}}")
    assert [c.id for c in rules["part"].causes] == ["part"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rules: {part: error}", {"part.orphan": "error", "part.frozen": "error"}),
        ("rules: {part: {severity: info}}", {"part.orphan": "info", "part.frozen": "info"}),
        ("rules: {part.frozen: error}", {"part.orphan": "error", "part.frozen": "error"}),
        ("rules: {part: {severity: info, causes: {frozen: error}}}", {"part.orphan": "info", "part.frozen": "error"}),
        ("rules: {part: {causes: {orphan: {severity: null}}}}", {"part.orphan": "warning", "part.frozen": "warning"}),
    ],
)
def test_a_key_that_a_nearer_file_gives_the_rule_counts_for_all_its_causes(
    known, text: str, expected: dict[str, str]
) -> None:
    rules = nearer(known, text)
    assert {c.id: str(c.severity) for c in rules["part"].causes} == expected


@pytest.mark.parametrize(
    ("text", "choice", "left"),
    [
        ("rules: {part: off}", {}, ["single"]),
        ("rules: {part.frozen: off}", {}, ["part.orphan", "single"]),
        ("rules: {part: {causes: {frozen: off}}}", {}, ["part.orphan", "single"]),
        ("rules: {part: off, part.frozen: on}", {}, ["part.frozen", "single"]),
        ("rules: {}", {"off": ["part.orphan"]}, ["part.frozen", "single"]),
        ("rules: {}", {"off": ["part"]}, ["single"]),
        ("rules: {}", {"off": ["part.*"]}, ["single"]),
        ("rules: {}", {"only": ["part.frozen"]}, ["part.frozen"]),
        ("rules: {}", {"only": ["par*"]}, ["part.orphan", "part.frozen"]),
        ("rules: {part: off}", {"only": ["part"]}, ["part.orphan", "part.frozen"]),
    ],
)
def test_off_and_only_name_a_rule_or_a_cause(known, text: str, choice: dict[str, Any], left: list[str]) -> None:
    assert [c.id for c in nearer(known, text, **choice).causes] == left


def test_what_is_off_is_listed_by_the_shortest_name(known) -> None:
    assert load(known, BASE, off=["part"]).off == ["part"]
    assert load(known, BASE, off=["part.frozen"]).off == ["part.frozen"]


@pytest.mark.parametrize("path", ["part.causes.frozen.when.above", "part.frozen.when.above"])
def test_set_changes_one_leaf_of_a_cause(known, path: str) -> None:
    rules = load(known, BASE, set=[f"{path}=7", "part.orphan.then=[stop]"])
    assert rules.cause("part.frozen").when == {"above": 7}
    assert [a.name for a in rules.cause("part.orphan").actions] == ["stop"]
    assert rules.cause("part.orphan").when == {"above": 0}


def test_set_of_a_rule_counts_for_all_its_causes(known) -> None:
    rules = load(known, BASE, set=["part.severity=info"])
    assert {str(c.severity) for c in rules["part"].causes} == {"info"}


def test_a_profile_changes_causes_and_its_defaults_give_way_to_your_own_keys(known) -> None:
    text = BASE + "profiles:\n  ci: {defaults: {for: 1}, rules: {part.frozen: info}}\n"
    rules = load(known, text, profile="ci")
    assert str(rules.cause("part.frozen").severity) == "info"
    assert rules.cause("part.frozen").hold == Hold(5, 5), "written in your own file"


def test_a_mute_of_a_rule_covers_its_causes_and_one_of_a_cause_that_alone(known) -> None:
    assert Mute("part", "known").covers("part.frozen", 3)
    assert Mute("part.frozen", "known").covers("part.frozen", 3)
    assert not Mute("part.frozen", "known").covers("part.orphan", 3)
    assert not Mute("part.frozen", "known").covers("part", 3)
    assert Mute("part.*", "known").covers("part.orphan", 3)
    assert not Mute("part.*", "known").covers("part", 3)
    rules = load(known, BASE, mute=["part.frozen@100..200:new data"])
    assert [(m.rule, m.first, m.last, m.reason) for m in rules.mutes] == [("part.frozen", 100, 200, "new data")]


def test_the_effective_text_loads_to_the_same_causes(known) -> None:
    first = nearer(known, "rules: {part: error, part.frozen: {for: 3}}", off=["part.orphan"])
    second = load(known, first.text)
    assert second.off == first.off == ["part.orphan"]
    assert [(c.id, c.when, c.hold, c.severity, c.kind, c.cooldown, c.tags) for c in second.causes] == [
        (c.id, c.when, c.hold, c.severity, c.kind, c.cooldown, c.tags) for c in first.causes
    ]


def test_an_old_id_may_be_a_cause_now(known) -> None:
    pack = BASE + "renamed: {never-optimised: part.orphan}\n"
    loaded = load_all([pack, "version: 1\nrules: {never-optimised: off}\n"], registry=known)
    assert loaded.errors == []
    assert [c.id for c in loaded.ruleset.causes] == ["part.frozen", "single"]
    assert [(p.slug, p.fix) for p in loaded.ruleset.warnings] == [("renamed-rule", ("never-optimised", "part.orphan"))]


@pytest.mark.parametrize(
    ("text", "choice", "said"),
    [
        ("rules: {part.frozn: off}", {}, '"frozn" is not a cause of "part"'),
        ("rules: {single.one: off}", {}, '"one" is not a cause of "single"'),
        ("rules: {part: {metric: c}}", {}, 'every cause of "part" has a `metric` of its own'),
        ("rules: {part.frozen: {kind: fact}, part.orphan: {kind: trend}}", {}, "`orphan` is a trend and stands before"),
        ("rules: {}", {"off": ["part.frozn"]}, '"frozn" is not a cause of "part"'),
        ("rules: {}", {"only": ["frozen"]}, '"frozen" is not a rule'),
        ("rules: {}", {"set": ["part.causes.frozn.for=3"]}, '"frozn" is not a cause of "part"'),
        ("rules: {}", {"mute": ["part.frozn"]}, '"frozn" is not a cause of "part"'),
    ],
)
def test_a_mistake_about_a_cause_is_said_with_what_was_meant(
    known, text: str, choice: dict[str, Any], said: str
) -> None:
    errors = load_all([BASE, f"version: 1\n{text}\n"], registry=known, **choice).errors
    assert len(errors) == 1
    assert errors[0].message.startswith(said)
    assert errors[0].suggestion


def test_a_word_in_holds_back_that_means_nothing_is_warned_of(known) -> None:
    loaded = load_all([BASE, "version: 1\nrules: {part: {holds_back: [trend, weight]}}\n"], registry=known)
    assert [(p.slug, p.suggestion) for p in loaded.ruleset.warnings] == [
        ("holds-back-nothing", 'did you mean "weights"?')
    ]
