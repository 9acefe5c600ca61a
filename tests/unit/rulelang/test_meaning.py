"""What rules mean together: who owns NaN, what registries and plugins allow, what lint says."""

from __future__ import annotations

import pytest
from language import BASE, condition, errors, load, registry

from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import owners

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
    assert owners(rules.causes) == {"high": "nan"}


def test_an_empty_registry_accepts_any_metric_and_action() -> None:
    """The engine's own tests and readers of records have no probes at hand."""
    from healthcheck.extend.host import PluginHost
    from healthcheck.rulelang import conditions

    host = PluginHost()
    host.load_builtins([conditions])
    rules = load_rules(
        [{"a": {"metric": "anything", "when": {"above": 1}, "then": ["whatever"]}}], registry=host.registry
    )
    assert rules.cause("a").actions[0].name == "whatever"


def test_external_metrics_may_be_globs(known) -> None:
    text = "version: 1\nexternal: ['kl.*']\nrules: {a: {metric: kl.policy, when: {above: 1}}}\n"
    assert load(known, text).cause("a")


def test_a_plugin_whose_compiler_breaks_is_named_at_its_line(known) -> None:
    from healthcheck.core.protocols import ConditionType

    broken = registry()

    def compile(options, rule):
        raise ZeroDivisionError("oops")

    broken.adder("conditions", "acme")(ConditionType("acme.odd", {"type": "object"}, compile))
    found = errors(broken, "version: 1\nrules:\n  a: {metric: loss, when: {acme.odd: {}}}\n")
    assert found == [
        '<rules>:3:28: error[condition-failed]: condition "acme.odd" could not be prepared: ZeroDivisionError: oops'
    ]


@pytest.mark.parametrize(
    ("part", "lacks"),
    [
        ("condition", "bounded, sentence, baseline, min_samples, window, absence, first, across, parts"),
        ("comparator", "breaches.direction, breaches.healthy, breaches.exact, breaches.closer, breaches.quiet"),
        ("scorer", "start().normal, start().memoryless, start().bound, start().restore"),
    ],
)
def test_a_condition_that_lacks_a_part_of_its_protocol_is_said_before_training(known, part: str, lacks: str) -> None:
    from healthcheck.core.protocols import ConditionType
    from healthcheck.rulelang.comparators import Threshold
    from healthcheck.rulelang.conditions.base import CompiledCondition

    class Half:
        name, judges_nonfinite, breaches = "acme.odd", False, Threshold("above", 1)

        def start(self):
            return None

    class HalfComparator:
        text = "odd"

        def __call__(self, score):
            return False

    class HalfScorer:
        def update(self, values, steps, quiet):
            return []

        def state(self):
            return None

    made = {
        "condition": Half(),
        "comparator": CompiledCondition("acme.odd", HalfComparator(), HalfScorer),
        "scorer": CompiledCondition("acme.odd", Threshold("above", 1), HalfScorer),
    }[part]
    extended = registry()
    extended.adder("conditions", "acme")(ConditionType("acme.odd", {"type": "object"}, lambda options, rule: made))
    (found,) = errors(extended, "version: 1\nrules:\n  a: {metric: loss, when: {acme.odd: {}}}\n")
    start, _, names = found.partition("it lacks ")
    assert "error[condition-failed]" in start
    assert set(names.split(", ")) == set(lacks.split(", "))


def test_options_of_a_plugin_condition_are_checked_like_our_own(known) -> None:
    from healthcheck.core.protocols import ConditionType

    extended = registry()
    schema = {"type": "object", "properties": {"width": {"type": "number"}}, "additionalProperties": False}
    extended.adder("conditions", "acme")(ConditionType("acme.odd", schema, lambda options, rule: condition("above", 1)))
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
        assert load_rules(source, registry=known).cause("loss-high").condition.name == "above"


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
