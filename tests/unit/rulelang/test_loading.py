"""From files to rules: inheritance, profiles, overrides, and errors that name their place."""

from __future__ import annotations

import pytest
from language import registry

from healthcheck.errors import RuleFileError
from healthcheck.rulelang import packs
from healthcheck.rulelang.compile import load_all, load_rules
from healthcheck.rulelang.ownership import owners
from healthcheck.rulelang.rule import Hold, Span
from healthcheck.verdicts import Severity

BASE = """\
version: 1
defaults: {warmup: 50}
rules:
  loss-high: {metric: loss, when: {above: 5}, for: 3, severity: error, tags: [loss]}
  lr-zero: {metric: lr, when: {equals: 0}}
  opt-in: {metric: lr, when: {above: 1}, enabled: false}
profiles:
  ci:
    defaults: {warmup: 5}
    rules: {lr-zero: off, loss-high: {for: 1}}
"""


@pytest.fixture(scope="module")
def known():
    return registry()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packs, "pack_folder", lambda: tmp_path / "packs")
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "base.yaml").write_text(BASE)
    return tmp_path


def load(known, *sources, **options):
    return load_rules(list(sources), registry=known, **options)


def errors(known, *sources, **options):
    with pytest.raises(RuleFileError) as raised:
        load_rules(list(sources), registry=known, **options)
    return [str(p) for p in raised.value.problems]


# --------------------------------------------------------------------------- the override sentence


def test_a_key_you_write_replaces_that_whole_key(known, folder) -> None:
    (folder / "mine.yaml").write_text(
        "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {when: {mean: {above: 3}}}\n"
    )
    rule = load(known, "mine.yaml")["loss-high"]
    assert rule.when == {"mean": {"above": 3}}
    assert rule.hold == Hold(3, 3)
    assert str(rule.key_origins["when"]) == "mine.yaml:4"
    assert str(rule.key_origins["for"]) == "healthcheck:base:4"


def test_null_returns_a_key_to_its_default(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {for: null, severity: null, warmup: null}\n"
    rule = load(known, text)["loss-high"]
    assert (rule.hold, rule.severity, rule.warmup) == (Hold(1, 1), Severity.WARNING, Span(0))


def test_defaults_apply_to_rules_written_in_that_file_only(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\ndefaults: {cooldown: 9}\nrules:\n  mine: {metric: loss, when: {above: 9}}\n"
    rules = load(known, text)
    assert (rules["mine"].cooldown, rules["mine"].warmup) == (9, Span(0))
    assert (rules["lr-zero"].cooldown, rules["lr-zero"].warmup) == (None, Span(50))


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
    assert load(known, text)["loss-high"].hold == Hold(9, 9)


# --------------------------------------------------------------------------- profiles


def test_a_profile_is_applied_last(known, folder) -> None:
    rules = load(known, "healthcheck:base", profile="ci")
    assert rules["loss-high"].hold == Hold(1, 1)
    assert rules["loss-high"].warmup == Span(5)
    assert "lr-zero" in rules.off
    assert rules.profile == "ci"


def test_a_packs_profile_gives_way_to_keys_of_your_own_file(known, folder) -> None:
    text = "version: 1\nextends: [healthcheck:base]\nrules:\n  loss-high: {warmup: 7, for: 4}\n  lr-zero: on\n"
    rules = load(known, text, profile="ci")
    assert (rules["loss-high"].warmup, rules["loss-high"].hold) == (Span(7), Hold(4, 4))
    assert rules["lr-zero"].warmup == Span(5)


def test_your_own_profile_beats_your_own_file(known, folder) -> None:
    text = BASE + "    settings: {mode: observe}\nsettings: {mode: act, profile: ci}\n"
    rules = load(known, text)
    assert rules.profile == "ci"
    assert rules.settings["mode"] == "observe"
    assert rules["loss-high"].hold == Hold(1, 1)


def test_an_unknown_profile_is_an_error_that_names_the_known_ones(known) -> None:
    assert errors(known, BASE, profile="cl") == [
        '--profile cl: error[unknown-profile]: there is no profile "cl" (there are ci)'
    ]


# --------------------------------------------------------------------------- command line


def test_set_changes_one_leaf_and_the_last_one_wins(known) -> None:
    text = "version: 1\nrules: {spike: {metric: loss, when: {robust_z: {above: 8, window: 200}}}}\n"
    rule = load(known, text, set=["spike.when.robust_z.above=12", "spike.when.robust_z.above=14", "spike.for=3 of 5"])[
        "spike"
    ]
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


# --------------------------------------------------------------------------- packs and files


def test_a_pinned_pack_is_the_frozen_file_beside_the_newest(known, folder) -> None:
    (folder / "packs" / "base@1.yaml").write_text(BASE.replace("above: 5", "above: 1"))
    (folder / "packs" / "base.yaml").write_text(BASE + "pack: {version: 2}\n")
    assert load(known, "healthcheck:base@1")["loss-high"].when == {"above": 1}
    assert load(known, "healthcheck:base@2")["loss-high"].when == {"above": 5}
    assert load(known, "healthcheck:base")["loss-high"].when == {"above": 5}
    assert "has no version 3" in errors(known, "healthcheck:base@3")[0]


def test_a_plugin_pack_is_named_with_its_plugin(folder) -> None:
    known = registry()
    (folder / "acme.yaml").write_text(BASE)
    known.adder("rulepacks", "acme")("strict", str(folder / "acme.yaml"))
    assert load(known, "version: 1\nextends: [acme:strict]\nrules: {}\n")["loss-high"]


def test_a_renamed_rule_lives_on_under_its_old_id(known, folder) -> None:
    (folder / "packs" / "base.yaml").write_text(BASE + "renamed: {loss-too-high: loss-high}\n")
    (folder / "mine.yaml").write_text("version: 1\nextends: [healthcheck:base]\nrules:\n  loss-too-high: {for: 8}\n")
    loaded = load_all(["mine.yaml"], registry=known)
    assert loaded.ruleset["loss-high"].hold == Hold(8, 8)
    (warning,) = (p for p in loaded.ruleset.warnings if p.slug == "renamed-rule")
    assert warning.fix == ("loss-too-high", "loss-high")
    assert str(warning).startswith("mine.yaml:4:3: warning[renamed-rule]")


def test_relative_files_start_at_the_file_that_names_them(known, folder) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "a.yaml").write_text(BASE)
    (folder / "deep" / "b.yaml").write_text("version: 1\nextends: [a.yaml]\nrules: {}\n")
    (folder / "c.yaml").write_text("version: 1\nextends: [deep/b.yaml]\nrules: {}\n")
    assert load(known, "c.yaml")["loss-high"]


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


# --------------------------------------------------------------------------- rules from code


def test_rules_may_come_as_a_dict(known) -> None:
    rules = load(known, {"kl-too-high": {"metric": "loss", "when": {"above": 0.2}, "for": "3 of 5"}})
    assert rules["kl-too-high"].hold == Hold(3, 5)


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
    assert [(r.id, r.when, r.hold, r.warmup, r.actions) for r in second.rules] == [
        (r.id, r.when, r.hold, r.warmup, r.actions) for r in first.rules
    ]
    assert second.off == first.off


# --------------------------------------------------------------------------- meaning


def test_ownership_of_nan_goes_by_base_name_and_phase(known) -> None:
    rules = load(
        known,
        """\
version: 1
rules:
  nan: {metric: "grad_norm[*]", when: nonfinite, phase: train}
  high: {metric: grad_norm, when: {above: 5}, phase: train}
  high-anywhere: {metric: grad_norm, when: {above: 6}}
  other: {metric: loss, when: {above: 5}}
""",
    )
    assert owners(rules.rules) == {"high": "nan"}


def test_an_empty_registry_accepts_any_metric_and_action() -> None:
    """The engine's own tests and readers of records have no probes at hand."""
    from healthcheck.plugins import PluginHost
    from healthcheck.rulelang import conditions

    host = PluginHost()
    host.load_builtins([conditions])
    rules = load_rules(
        [{"a": {"metric": "anything", "when": {"above": 1}, "then": ["whatever"]}}], registry=host.registry
    )
    assert rules["a"].actions[0].name == "whatever"


def test_external_metrics_may_be_globs(known) -> None:
    text = "version: 1\nexternal: ['kl.*']\nrules: {a: {metric: kl.policy, when: {above: 1}}}\n"
    assert load(known, text)["a"]


def test_a_plugin_whose_compiler_breaks_is_named_at_its_line(known) -> None:
    from healthcheck.protocols import ConditionType

    broken = registry()

    def compile(options, rule):
        raise ZeroDivisionError("oops")

    broken.adder("conditions", "acme")(ConditionType("acme.odd", {"type": "object"}, compile))
    found = errors(broken, "version: 1\nrules:\n  a: {metric: loss, when: {acme.odd: {}}}\n")
    assert found == [
        '<rules>:3:28: error[condition-failed]: condition "acme.odd" could not be prepared: ZeroDivisionError: oops'
    ]


def test_options_of_a_plugin_condition_are_checked_like_our_own(known) -> None:
    from healthcheck.protocols import ConditionType

    extended = registry()
    schema = {"type": "object", "properties": {"width": {"type": "number"}}, "additionalProperties": False}
    extended.adder("conditions", "acme")(ConditionType("acme.odd", schema, lambda options, rule: None))
    found = errors(extended, "version: 1\nrules:\n  a: {metric: loss, when: {acme.odd: {widht: 3}}}\n")
    assert 'did you mean "width"?' in found[0]


@pytest.mark.parametrize(
    ("rule", "slug"),
    [
        ("{metric: loss, when: {above: 5}, then: [stop]}", "stop-below-error"),
        ("{metric: loss, when: {above: 5}, then: [cleanup]}", "cleanup-without-cooldown"),
        ("{metric: loss, when: {robust_z: {above: 8, window: 20}}}", "small-window"),
        ("{metric: loss, when: {above: 5}, recover: {below: 6}}", "strict-recover"),
        ("{metric: loss, when: {above: 5}, outliers: clip}", "no-baseline"),
        ("{metric: loss, when: {above: 5}, warmup: 2 evals}", "evals-of-training"),
        ("{metric: loss, when: {above: 5}, hint: 'look at step {step}'}", "placeholder-in-hint"),
        ("{metric: loss, when: {above: 5}}", "nan-unwatched"),
    ],
)
def test_lint_warns_of_what_is_probably_not_meant(known, rule, slug) -> None:
    rules = load(known, f"version: 1\nrules:\n  a: {rule}\n")
    assert slug in {p.slug for p in rules.warnings}
    assert all(p.severity == "warning" and p.line for p in rules.warnings)


def test_a_sound_rule_file_gives_no_warning(known) -> None:
    text = """\
version: 1
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [evidence, stop]}
  loss-spike: {metric: loss, when: {robust_z: {above: 8, window: 200}}, recover: {below: 4}, for: 2}
  memory-high: {metric: memory.fraction, when: {above: 0.9}, recover: {below: 0.85}, cooldown: 200, then: [cleanup]}
"""
    assert load(known, text).warnings == []


def test_a_rule_that_cannot_fire_within_the_profiles_steps_is_pointed_out(known) -> None:
    text = "version: 1\nrules: {a: {metric: lr, when: {above: 5}, for: 50}}\nprofiles: {ci: {steps: 30}}\n"
    assert "never-in-time" in {p.slug for p in load(known, text, profile="ci").warnings}
    assert "never-in-time" not in {p.slug for p in load(known, text).warnings}


def test_five_hundred_rules_load(known) -> None:
    rule = "  rule-{}:\n    metric: loss\n    when: {{robust_z: {{above: {}, window: 200}}}}\n    for: 3 of 5\n    severity: error\n    message: 'loss {{value:.3g}}'\n"
    text = "version: 1\nrules:\n" + "".join(rule.format(i, 5 + i / 100) for i in range(500))
    assert len(load(known, text).rules) == 500  # how long that takes: benchmarks/engine.py


def test_one_source_need_not_be_wrapped_in_a_list(known, folder) -> None:
    (folder / "mine.yaml").write_text(BASE)
    for source in ("mine.yaml", folder / "mine.yaml", BASE, {"loss-high": {"metric": "loss", "when": {"above": 5}}}):
        assert load_rules(source, registry=known)["loss-high"].condition.name == "above"


def test_a_condition_switched_to_false_is_refused(known) -> None:
    assert "rule-id: off" in errors(known, "version: 1\nrules: {a: {metric: loss, when: {nonfinite: false}}}\n")[0]


def test_the_rule_language_imports_neither_torch_nor_yaml_until_a_file_is_read() -> None:
    import subprocess
    import sys

    code = (
        "import sys, healthcheck.rulelang.compile, healthcheck.rulelang.conditions, healthcheck.rulelang.discover\n"
        "print([m for m in ('torch', 'yaml', 'jsonschema', 'rich', 'pytest', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
