"""From files to rules: inheritance, profiles, packs, and errors that name their place."""

from __future__ import annotations

import pytest
from language import BASE, errors, load, registry

from healthcheck.core.alerts import Severity
from healthcheck.rulelang import loader
from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.loader import load_text
from healthcheck.rulelang.rule import Hold, Span

# --------------------------------------------------------------------------- the override sentence


def test_a_key_you_write_replaces_that_whole_key(known, folder) -> None:
    (folder / "mine.yaml").write_text(
        "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {when: {mean: {above: 3}}}\n"
    )
    rule = load(known, "mine.yaml").cause("loss-high")
    assert rule.when == {"mean": {"above": 3}}
    assert rule.hold == Hold(3, 3)
    assert str(rule.key_origins["when"]) == "mine.yaml:4"
    assert str(rule.key_origins["for"]) == "healthcheck:base:4"


def test_null_returns_a_key_to_its_default(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {for: null, severity: null, warmup: null}\n"
    rule = load(known, text).cause("loss-high")
    assert (rule.hold, rule.severity, rule.warmup) == (Hold(1, 1), Severity.WARNING, Span(0))


def test_defaults_apply_to_rules_written_in_that_file_only(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\ndefaults: {cooldown: 9}\nrules:\n  mine: {metric: loss, when: {above: 9}}\n"
    rules = load(known, text)
    assert (rules.cause("mine").cooldown, rules.cause("mine").warmup) == (9, Span(0))
    assert (rules.cause("lr-zero").cooldown, rules.cause("lr-zero").warmup) == (None, Span(50))


@pytest.mark.parametrize(
    ("word", "severity"), [("error", Severity.ERROR), ("info", Severity.INFO), ("on", Severity.WARNING)]
)
def test_one_word_changes_the_severity_or_switches_a_rule_on(known, folder, word, severity) -> None:
    rules = load(known, f"version: 1\nextends: [healthcheck:base]\nrules: {{opt-in: {word}}}\n")
    assert rules["opt-in"].severity is severity


def test_off_is_a_word_and_not_false(known, folder) -> None:
    for word in ("off", "false"):
        rules = load(known, f"version: 1\nextends: [healthcheck:base]\nrules: {{lr-zero: {word}}}\n")
        assert "lr-zero" in rules.off
        assert [r.id for r in rules.rules] == ["loss-high"]


def test_later_sources_win_and_a_file_extended_twice_counts_once(known, folder) -> None:
    (folder / "team.yaml").write_text("version: 1\nextends: [healthcheck:base]\nrules: {loss-high: {for: 9}}\n")
    text = "version: 1\nextends: [team.yaml, healthcheck:base]\nrules: {}\n"
    assert load(known, text).cause("loss-high").hold == Hold(9, 9)


# --------------------------------------------------------------------------- profiles


def test_a_profile_is_applied_last(known, folder) -> None:
    rules = load(known, "healthcheck:base", profile="ci")
    assert rules.cause("loss-high").hold == Hold(1, 1)
    assert rules.cause("loss-high").warmup == Span(5)
    assert "lr-zero" in rules.off
    assert rules.profile == "ci"


def test_a_packs_profile_gives_way_to_keys_of_your_own_file(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {warmup: 7, for: 4}\n  lr-zero: on\n"
    rules = load(known, text, profile="ci")
    assert (rules.cause("loss-high").warmup, rules.cause("loss-high").hold) == (Span(7), Hold(4, 4))
    assert rules.cause("lr-zero").warmup == Span(5)


def test_your_own_profile_beats_your_own_file(known, folder) -> None:
    text = BASE + "    settings: {mode: observe}\nsettings: {mode: act, profile: ci}\n"
    rules = load(known, text)
    assert rules.profile == "ci"
    assert rules.settings["mode"] == "observe"
    assert rules.cause("loss-high").hold == Hold(1, 1)


def test_an_unknown_profile_is_an_error_that_names_the_known_ones(known) -> None:
    assert errors(known, BASE, profile="cl") == [
        '--profile cl: error[unknown-profile]: there is no profile "cl" (there are ci)'
    ]


# --------------------------------------------------------------------------- packs and files


def test_a_pinned_pack_is_the_frozen_file_beside_the_newest(known, folder) -> None:
    (folder / "packs" / "base@1.yaml").write_text(BASE.replace("above: 5", "above: 1"))
    (folder / "packs" / "base.yaml").write_text(BASE + "pack: {version: 2}\n")
    assert load(known, "healthcheck:base@1").cause("loss-high").when == {"above": 1}
    assert load(known, "healthcheck:base@2").cause("loss-high").when == {"above": 5}
    assert load(known, "healthcheck:base").cause("loss-high").when == {"above": 5}
    assert "has no version 3" in errors(known, "healthcheck:base@3")[0]


def test_a_plugin_pack_is_named_with_its_plugin(folder) -> None:
    known = registry()
    (folder / "acme.yaml").write_text(BASE)
    known.adder("rulepacks", "acme")("strict", str(folder / "acme.yaml"))
    assert load(known, "version: 1\nextends: [acme:strict]\nrules: {}\n").cause("loss-high")


def test_a_renamed_rule_lives_on_under_its_old_id(known, folder) -> None:
    (folder / "packs" / "base.yaml").write_text(BASE + "renamed: {loss-too-high: loss-high}\n")
    (folder / "mine.yaml").write_text("version: 1\nextends: [healthcheck:base]\nrules:\n  loss-too-high: {for: 8}\n")
    loaded = load_all(["mine.yaml"], registry=known)
    assert loaded.ruleset.cause("loss-high").hold == Hold(8, 8)
    (warning,) = (p for p in loaded.ruleset.warnings if p.slug == "renamed-rule")
    assert warning.fix == ("loss-too-high", "loss-high")
    assert str(warning).startswith("mine.yaml:4:3: warning[renamed-rule]")


def test_relative_files_start_at_the_file_that_names_them(known, folder) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "a.yaml").write_text(BASE)
    (folder / "deep" / "b.yaml").write_text("version: 1\nextends: [a.yaml]\nrules: {}\n")
    (folder / "c.yaml").write_text("version: 1\nextends: [deep/b.yaml]\nrules: {}\n")
    assert load(known, "c.yaml").cause("loss-high")


def test_a_circle_of_files_is_an_error(known, folder) -> None:
    (folder / "a.yaml").write_text("version: 1\nextends: [b.yaml]\nrules: {}\n")
    (folder / "b.yaml").write_text("version: 1\nextends: [a.yaml]\nrules: {}\n")
    assert errors(known, "a.yaml") == [
        "b.yaml:2:11: error[extends-cycle]: `extends` goes in a circle: a.yaml -> b.yaml -> a.yaml"
    ]


@pytest.mark.parametrize("source", ["nothing.yaml", ".", 17])
def test_a_source_that_is_no_file_is_one_clean_error(known, folder, source) -> None:
    assert len(errors(known, source)) == 1


def test_all_problems_of_all_files_come_at_once(known, folder) -> None:
    (folder / "a.yaml").write_text("version: 1\nrules: {a: {metric: los, when: {above: 5}}}\n")
    (folder / "b.yaml").write_text("version: 1\nextends: [a.yaml]\nrules: {b: {metric: loss, when: {abov: 5}}}\n")
    found = errors(known, "b.yaml")
    assert [f.split(":")[0] for f in found] == ["a.yaml", "b.yaml"]


def test_a_text_that_was_read_before_gives_the_same_problems_at_the_same_places(known) -> None:
    """A second session in the process reads the packs from memory: what a first one did to them must not show."""
    text = "version: 1\nrules:\n  high:\n    metric: loss\n    condition: {above: 5}\n    patience: soon\n"
    first, second = (load_all([text], registry=known).problems for _ in range(2))
    assert {problem.line for problem in first} == {5, 6}
    assert [str(problem) for problem in second] == [str(problem) for problem in first]


def test_what_is_done_to_one_document_does_not_show_in_the_next_of_the_same_text() -> None:
    text = "version: 1\nrules:\n  high: {metric: loss, when: {outside: [1, 2]}}\n"
    first = load_text(text)
    first.data["rules"]["high"]["when"]["outside"].append(3)
    first.rename(("rules", "high"), "metric", "signal")
    second = load_text(text)
    assert second.data["rules"]["high"] == {"metric": "loss", "when": {"outside": [1, 2]}}
    mark = second.mark(("rules", "high", "metric"))
    assert mark is not None
    assert (mark.line, mark.column) == (3, 18)


def test_the_texts_that_are_kept_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(loader, "_read", {})
    for i in range(3 * loader.KEPT):
        load_text(f"version: 1 # {i}\n")
    load_text("version: 1 #" + "x" * loader.LONGEST_KEPT)
    assert [text for text in loader._read if "# " not in text] == []
    assert len(loader._read) == loader.KEPT
