"""What holds for all shipped packs together: tests in both polarities, sources, profiles, ci-smoke, explanations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import Cause, RuleSet

RULES = Path(__file__).resolve().parents[2] / "rules"
DOMAINS = ("gan", "rl", "finetune", "moe", "ranks")
WHERE_RULES_ARE = ("core", "wiring", "curves", "performance", *DOMAINS, "preview")
PACKS = (*WHERE_RULES_ARE, "recommended", "strict", "ci-smoke")
PROFILES = ("production", "debugging", "ci", "memory-constrained", "minimal")


def rules() -> dict[str, dict[str, Any]]:
    """Each rule where it is written in full."""
    return {
        rule: body for pack in WHERE_RULES_ARE for rule, body in load_file(RULES / f"{pack}.yaml").data["rules"].items()
    }


def causes() -> dict[str, dict[str, Any]]:
    """Each cause by its full name, with the keys of its rule filled in."""
    found = {}
    for rule, body in rules().items():
        keys = {key: value for key, value in body.items() if key != "causes"}
        for cause, own in body.get("causes", {"": {}}).items():
            found[f"{rule}.{cause}" if cause else rule] = {**keys, **own}
    return found


def rule_tests() -> list[dict[str, Any]]:
    return [test for path in sorted(RULES.glob("*.hctest.yaml")) for test in load_file(path).data["tests"]]


WRITTEN = causes()
ORDER = ("fact", "measure", "trend")
TESTS = rule_tests()


def load(pack: str, profile: str | None = None) -> RuleSet:
    return load_rules_for(host=plugin_host(), rules=f"healthcheck:{pack}", profile=profile)


def plays(cause: str, test: dict[str, Any]) -> bool:
    """Whether the cause is in the test and something that it watches is fed."""
    fed = {name.partition("[")[0] for name in test["series"]}
    watched = WRITTEN[cause]["metric"].partition("[")[0]
    formulas = {"single_loss": "loss"}
    return ("only" not in test or cause in test["only"]) and formulas.get(watched, watched) in fed


@pytest.mark.parametrize("cause", WRITTEN)
def test_a_cause_is_expected_in_one_test_and_silent_in_another(cause: str) -> None:
    firing = [t for t in TESTS if t["expect"] != "none" and any(e["rule"] == cause for e in t["expect"])]
    silent = [t for t in TESTS if t["expect"] == "none" and plays(cause, t)]
    assert firing, f"no rule test expects {cause}"
    assert silent, f"no rule test keeps {cause} silent"


def test_each_rule_is_written_once() -> None:
    count = [rule for pack in WHERE_RULES_ARE for rule in load_file(RULES / f"{pack}.yaml").data["rules"]]
    assert len(count) == len(set(count))
    for pack in ("recommended", "strict"):
        changed = load_file(RULES / f"{pack}.yaml").data.get("rules", {})
        assert not [rule for rule, body in changed.items() if isinstance(body, dict) and {"metric", "when"} & set(body)]


@pytest.mark.parametrize("cause", WRITTEN)
def test_a_cause_says_how_bad_it_is_what_to_try_what_it_names_and_where_that_is_known_from(cause: str) -> None:
    assert {"kind", "severity", "hint", "tags", "docs", "message", "basis"} <= set(WRITTEN[cause])
    assert WRITTEN[cause]["docs"] == f"rules/{cause.partition('.')[0]}"
    assert all(WRITTEN[cause]["basis"])


@pytest.mark.parametrize("cause", WRITTEN)
def test_what_a_cause_says_fits_a_block_of_eighty_columns(cause: str) -> None:
    for key in ("message", "hint"):
        assert len(WRITTEN[cause][key]) <= 125, WRITTEN[cause][key]


def test_the_causes_of_a_rule_stand_in_the_order_of_their_certainty() -> None:
    for rule, body in rules().items():
        ranks = [ORDER.index(cause["kind"]) for cause in body.get("causes", {}).values()]
        assert ranks == sorted(ranks), rule


def test_few_explanations_are_kept_by_hand() -> None:
    kept = [*rules().values(), *load_file(RULES / "recommended.yaml").data["rules"].values()]
    assert sum(len(body.get("explains", ())) for body in kept) <= 60


def test_only_the_core_pack_may_act_on_a_run() -> None:
    acting = {"stop", "skip_update", "cleanup", "scale_lr", "checkpoint"}
    for pack in WHERE_RULES_ARE[1:]:
        for rule, body in load_file(RULES / f"{pack}.yaml").data["rules"].items():
            for cause in body.get("causes", {"": body}).values():
                assert not acting & set(cause.get("then", ())), (pack, rule)


def test_domain_packs_come_on_by_themselves_and_no_other_pack_does() -> None:
    for pack in WHERE_RULES_ARE:
        defaults = load_file(RULES / f"{pack}.yaml").data.get("defaults", {})
        assert ("applies_if" in defaults) == (pack in DOMAINS), pack


@pytest.mark.parametrize("pack", PACKS)
def test_a_pack_loads_without_a_warning_of_its_own(pack: str) -> None:
    found = load(pack)
    assert found.rules
    # A pack alone may leave NaN to the one that extends it; ci-smoke switches off what recommended has tuned.
    passed_over = () if pack == "recommended" else ("nan-unwatched", "rule-is-off")
    assert not [w for w in found.warnings if w.slug not in passed_over]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_loads_and_never_adds_a_stop(profile: str) -> None:
    found = load("recommended", profile)
    stopping = {cause.id for cause in found.causes if cause.may_stop}
    assert stopping <= {"loss-not-finite", "grads-not-finite.in-one-step"}
    assert "loss-not-finite" in {rule.id for rule in found.rules}


def test_the_smoke_pack_is_recommended_under_its_profile() -> None:
    def shape(cause: Cause) -> tuple[Any, ...]:
        return (
            cause.fingerprint,
            cause.hold,
            cause.warmup,
            cause.min_samples,
            cause.every,
            cause.severity,
            [a.name for a in cause.actions],
        )

    smoke, profile = load("ci-smoke"), load("recommended", "ci")
    assert {c.id: shape(c) for c in smoke.causes} == {c.id: shape(c) for c in profile.causes}
    assert [(r.id, r.explains, r.cooldown) for r in smoke.rules] == [
        (r.id, r.explains, r.cooldown) for r in profile.rules
    ]


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
    allowed |= {
        "attention.ahead",
        "targets.ahead",
        "targets.at_padding",
        "input.tells_label",
        "batch.empty_passes",
        "batch.stale",
    }
    allowed |= {"memory.kept_graphs"}
    allowed |= {"grads.unsynced", "layers.mixing", "optimizer.idle", "schedule.elsewhere", "schedule.half_cycles"}
    allowed |= {"schedule.unstepped", "workers.alike"}
    allowed |= {"params.fresh", "optimizer.eps_lost", "schedule.used", "targets.unseen", "copies.way"}
    # Only in runs that accumulate gradients, and in those whose loss has a logarithm, a root or a quotient.
    allowed |= {"updates.carried", "loss.undefined_derivatives"}
    # Compared at step 5 and once in 50 steps by their probe, where there are several ranks.
    allowed |= {m for m in registry.metrics if m.startswith("ranks.")} | {"ddp.replaced_parameters"}
    # Looked at in the first steps, at the first evaluations, or once in some hundred steps by their probes.
    allowed |= {
        "eval.trained_rows",
        "modules.dropping_in_eval",
        "loss.not_detached",
        "params.of_loss",
        "targets.unreachable",
        "outputs.clamped",
        "loss.unfit",
        "attention.unmasked",
        "attention.over_queries",
        "loss.cut_samples",
        "loss.constant_penalty",
        "modules.repeated",
        "modules.by_batch_in_eval",
        "layers.mixed_by_view",
        "params.zero_for_good",
        "layers.norm_of_one",
        "output.at_padding",
        "loss.miscompared",
        "loss.same_side",
        "loss.critic_unbound",
        "params.shared_memory",
        "sampler.mistaken",
        "layers.all_linear",
        "layers.half_read",
        "layers.carried_state",
        "tokens.padding_inside",
        "eval.inputs_changed",
        "eval.renumbered",
        "layers.rows_meet",
        "inputs.by_channels",
        "loss.gradientless",
        "attention.to_padding",
        "attention.positions_alike",
        "updates.of_few_passes",
    }
    allowed |= {"modules.keep_probability", "modules.momentum_of_keras", "optimizer.betas_swapped"}
    allowed |= {"schedule.of_micro_batches", "schedule.over"}
    # At the exception that ends a run.
    allowed |= {"oom.activations", "oom.state", "oom.fragmentation", "oom.host"}
    each_step = {cause.selector.metric for cause in load("recommended").causes if cause.every < 5}
    assert not (each_step & dear) - allowed


def test_explanations_go_from_the_specific_to_the_general() -> None:
    rules = {rule.id: rule for rule in load("recommended").rules}
    assert "part-does-not-train" in rules["update-loop-broken"].explains
    assert "grads-not-finite" in rules["loss-not-finite"].explains
    assert "overfit" in rules["loss-divergence"].explains
