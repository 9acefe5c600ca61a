"""What holds for all shipped packs together: tests in both polarities, profiles, ci-smoke, explanations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import Rule, RuleSet

RULES = Path(__file__).resolve().parents[2] / "rules"
THEMES = ("numerics", "optimisation", "memory", "throughput", "data", "eval", "rl")
PACKS = (*THEMES, "recommended", "strict", "ci-smoke")
PROFILES = ("production", "debugging", "ci", "memory-constrained", "minimal")


def written() -> dict[str, dict[str, Any]]:
    """Each rule where it is written in full."""
    return {rule: body for theme in THEMES for rule, body in load_file(RULES / f"{theme}.yaml").data["rules"].items()}


def rule_tests() -> list[dict[str, Any]]:
    return [test for path in sorted(RULES.glob("*.hctest.yaml")) for test in load_file(path).data["tests"]]


WRITTEN = written()
TESTS = rule_tests()


def load(pack: str, profile: str | None = None) -> RuleSet:
    return load_rules_for(host=plugin_host(), rules=f"healthcheck:{pack}", profile=profile)


def plays(rule: str, test: dict[str, Any]) -> bool:
    """Whether the rule is in the test and something that it watches is fed."""
    fed = {name.partition("[")[0] for name in test["series"]}
    watched = WRITTEN[rule]["metric"].partition("[")[0]
    formulas = {"single_loss": "loss"}
    return ("only" not in test or rule in test["only"]) and formulas.get(watched, watched) in fed


@pytest.mark.parametrize("rule", WRITTEN)
def test_a_rule_is_expected_in_one_test_and_silent_in_another(rule: str) -> None:
    firing = [t for t in TESTS if t["expect"] != "none" and any(e["rule"] == rule for e in t["expect"])]
    silent = [t for t in TESTS if t["expect"] == "none" and plays(rule, t)]
    assert firing, f"no rule test expects {rule}"
    assert silent, f"no rule test keeps {rule} silent"


def test_each_rule_is_written_once() -> None:
    count = [rule for theme in THEMES for rule in load_file(RULES / f"{theme}.yaml").data["rules"]]
    assert len(count) == len(set(count))
    for pack in ("recommended", "strict"):
        changed = load_file(RULES / f"{pack}.yaml").data["rules"]
        assert not [rule for rule, body in changed.items() if isinstance(body, dict) and {"metric", "when"} & set(body)]


@pytest.mark.parametrize("rule", WRITTEN)
def test_a_rule_says_how_bad_it_is_what_to_try_and_what_it_names(rule: str) -> None:
    assert {"severity", "hint", "tags", "docs", "message"} <= set(WRITTEN[rule])
    assert WRITTEN[rule]["docs"] == f"rules/{rule}"


@pytest.mark.parametrize("pack", PACKS)
def test_a_pack_loads_without_a_warning_of_its_own(pack: str) -> None:
    found = load(pack)
    assert found.causes
    # A theme alone may leave NaN to the pack that extends it; ci-smoke switches off what recommended has tuned.
    passed_over = () if pack == "recommended" else ("nan-unwatched", "rule-is-off")
    assert not [w for w in found.warnings if w.slug not in passed_over]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_loads_and_never_adds_a_stop(profile: str) -> None:
    found = load("recommended", profile)
    assert {rule.id for rule in found.causes if rule.may_stop} <= {"loss-not-finite", "grads-not-finite"}
    assert "loss-not-finite" in {rule.id for rule in found.causes}


def test_the_smoke_pack_is_recommended_under_its_profile() -> None:
    def shape(rule: Rule) -> tuple[Any, ...]:
        return (
            rule.fingerprint,
            rule.hold,
            rule.warmup,
            rule.min_samples,
            rule.every,
            rule.severity,
            [a.name for a in rule.actions],
        )

    smoke, profile = load("ci-smoke"), load("recommended", "ci")
    assert {r.id: shape(r) for r in smoke.causes} == {r.id: shape(r) for r in profile.causes}
    assert {r.id: (r.explains, r.cooldown) for r in smoke.rules} == {
        r.id: (r.explains, r.cooldown) for r in profile.rules
    }


def test_recommended_keeps_what_it_looks_at_each_step_cheap() -> None:
    """Walks over modules and device work beyond loss and gradient norm come every fifth step or more rarely."""
    from healthcheck.core.samples import Cost

    registry = plugin_host().registry
    dear = {key for key, metric in registry.metrics.items() if metric.cost in (Cost.HOST, Cost.DEVICE)}
    # Two that every run needs, one that its probe looks at once per 50 steps, three that read what was drawn anyway,
    # and what a GradScaler knows: it costs something only where there is one.
    allowed = {"loss", "grad_norm", "params.tied_lost", "batch.targets", "batch.hash_repeat", "batch.one_label"}
    allowed |= {"amp.scale", "amp.skipped", "amp.skipped_streak", "updates.skipped_streak"}
    # Looked at once or twice in a run, or at evaluations.
    allowed |= {"init.alike", "init.gain", "loss.misbuilt", "modules.train_in_eval", "batch.pass_repeat"}
    allowed |= {"attention.ahead", "targets.ahead", "input.tells_label", "batch.empty_passes", "batch.stale"}
    allowed |= {"memory.kept_graphs"}
    allowed |= {"grads.unsynced", "layers.mixing", "optimizer.idle", "schedule.elsewhere", "schedule.half_cycles"}
    allowed |= {"schedule.unstepped", "workers.alike"}
    each_step = {rule.selector.metric for rule in load("recommended").causes if rule.every < 5}
    assert not (each_step & dear) - allowed


def test_explanations_go_from_the_specific_to_the_general() -> None:
    rules = {rule.id: rule for rule in load("recommended").rules}
    assert "not-learning" in rules["optimizer-of-other-model"].explains
    assert "loss-not-finite" in rules["no-targets"].explains
    assert "loss-spike" in rules["loss-not-finite"].explains
    assert "overfit" in rules["loss-divergence"].explains
