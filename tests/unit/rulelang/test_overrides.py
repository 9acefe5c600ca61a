"""What the command line and code give beside files: ``--set``, ``--off``, ``--only``, mutes, dicts."""

from __future__ import annotations

import pytest
from language import BASE, errors, load

from healthcheck.rulelang.rule import Hold

# --------------------------------------------------------------------------- command line


def test_set_changes_one_leaf_and_the_last_one_wins(known) -> None:
    text = "version: 1\nrules: {spike: {metric: loss, when: {robust_z: {above: 8, window: 200}}}}\n"
    changes = ["spike.when.robust_z.above=12", "spike.when.robust_z.above=14", "spike.for=3 of 5"]
    rule = load(known, text, set=changes).cause("spike")
    assert rule.when == {"robust_z": {"above": 14, "window": 200}}
    assert rule.hold == Hold(3, 5)
    assert rule.condition.breaches.text == "above 14"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("spike.when.robust_z.abov=12", "unknown key"),
        ("spik.for=3", 'did you mean "spike"?'),
        ("spike.when.robust.above=12", 'did you mean "robust_z"?'),
        ("spike", "expected RULE.key=value"),
        ("spike.for=often", "not valid for `for`"),
        ("spike.for=[", "cannot be read"),
    ],
)
def test_a_wrong_set_is_answered(known, text, answer) -> None:
    rules = "version: 1\nrules: {spike: {metric: loss, when: {robust_z: {above: 8}}}}\n"
    found = errors(known, rules, set=[text])
    assert len(found) == 1
    assert found[0].startswith("--set ")
    assert answer in found[0]


def test_off_and_only_take_ids_and_globs(known) -> None:
    assert [r.id for r in load(known, BASE, off=["loss-*"]).rules] == ["lr-zero"]
    assert [r.id for r in load(known, BASE, only=["loss-high"]).rules] == ["loss-high"]
    assert [r.id for r in load(known, BASE, only=["opt-in"]).rules] == ["opt-in"], "naming it switches it on"
    assert 'did you mean "lr-zero"?' in errors(known, BASE, off=["lr-zer"])[0]


def test_mutes_carry_their_span_and_reason(known) -> None:
    rules = load(known, BASE, mute=["loss-high@120..150:new data", "lr-zero"])
    first, second = rules.mutes
    assert (first.rule, first.first, first.last, first.reason) == ("loss-high", 120, 150, "new data")
    assert first.covers("loss-high", 150)
    assert not first.covers("loss-high", 151)
    assert second.covers("lr-zero", 10**9)


def test_muting_a_rule_that_finds_nan_needs_force(known) -> None:
    text = "version: 1\nrules: {nan: {metric: loss, when: nonfinite}}\n"
    assert "--force" in errors(known, text, mute=["nan"])[0]
    assert load(known, text, mute=["nan"], force=True).mutes


# --------------------------------------------------------------------------- rules from code


def test_rules_may_come_as_a_dict(known) -> None:
    rules = load(known, {"kl-too-high": {"metric": "loss", "when": {"above": 0.2}, "for": "3 of 5"}})
    assert rules.cause("kl-too-high").hold == Hold(3, 5)


def test_errors_in_a_dict_name_the_key_path(known) -> None:
    found = errors(
        known, {"a": {"metric": "loss", "when": {"robust_z": {"abov": 1}}}, "b": {"metric": "los", "when": "nonfinite"}}
    )
    assert found[0].startswith("rules: rules.a.when.robust_z.abov: error[unknown-key]")
    assert any(f.startswith("rules: rules.b.metric: error[unknown-metric]") for f in found)


def test_a_dict_that_contains_itself_is_refused(known) -> None:
    loop: dict = {}
    loop["a"] = loop
    assert len(errors(known, loop)) == 1


def test_the_effective_text_loads_to_the_same_rules(known, folder) -> None:
    first = load(known, "healthcheck:base", profile="ci", set=["loss-high.when.above=7"])
    second = load(known, first.text)
    assert [(r.id, r.when, r.hold, r.warmup, r.actions) for r in second.causes] == [
        (r.id, r.when, r.hold, r.warmup, r.actions) for r in first.causes
    ]
    assert second.off == first.off
