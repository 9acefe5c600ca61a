"""The suite for the trainers that are driven: the same faults, the same rules, the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from drivers import DRIVERS, FAULTS, Order, Run
from test_behaviour import FAMILY, NAMES, Faulty, families, rules_with
from test_faults import declared_gaps
from told_drivers import TOLD
from toy import Toy

HEALTHY = replace(FAULTS["healthy"], steps=15)
TRAINERS = list(TOLD)
RAISES_ITSELF = {"dream", "torchtitan"}
"""They end the run about what is not finite, after the step in which the script goes on."""
GATES = [name for name in TRAINERS if name != "megatron_bridge"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(trainer: str, fault: str) -> Run:
        driver = TOLD.get(trainer) or DRIVERS[trainer]
        return driver(Order(FAULTS[fault], tmp_path_factory.mktemp(f"{trainer}-{fault}")))

    return run


def has_it(trainer: str, fault: str) -> bool:
    """Only Megatron Bridge scales its loss."""
    return fault != "scaler_overflow" or trainer == "megatron_bridge"


PAIRS = [(trainer, fault) for trainer in TRAINERS for fault in FAULTS if has_it(trainer, fault)]


@pytest.mark.parametrize(("trainer", "fault"), PAIRS)
def test_the_fault_is_found_by_its_rule_at_its_step(
    runs: Any, trainer: str, fault: str, record_property: Callable[[str, object], None]
) -> None:
    run, wanted = runs(trainer, fault), FAULTS[fault]
    assert run.session.report["internal_errors"] == []
    assert run.session.report["plugin_errors"] == []
    if not wanted.rule:
        assert run.fired == []
        return
    metric = next(rule.selector.metric for rule in run.session.rules.causes if rule.id == wanted.rule)
    if metric in declared_gaps(trainer):
        record_property("gap", declared_gaps(trainer)[metric])
        verdict = run.session.report["rules"][wanted.rule]
        assert (verdict["verdict"], verdict["reason"]) == ("not judged", declared_gaps(trainer)[metric])
        return
    steps = [step for name, step in run.fired if name == wanted.rule]
    assert steps, run.fired
    if wanted.step is not None:
        assert steps[0] == wanted.step


@pytest.mark.parametrize(("trainer", "fault"), [pair for pair in PAIRS if pair[1] != "memory_growth"])
def test_the_alerts_are_those_of_the_unmodified_script(runs: Any, trainer: str, fault: str) -> None:
    """Up to where the trainer raises by itself, and without rules that it cannot judge."""
    run, reference = runs(trainer, fault), list(runs("script", fault).fired)
    last = run.session.report["steps"]
    if trainer in RAISES_ITSELF and run.extra["ended"] is not None:
        reference = [(rule, step) for rule, step in reference if step <= last]
    else:
        assert last == FAULTS[fault].steps
    judged = {rule for rule, entry in run.session.report["rules"].items() if entry["verdict"] != "not judged"}
    assert run.fired == [(rule, step) for rule, step in reference if rule in judged]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_rule_is_judged_or_its_gap_is_declared(runs: Any, trainer: str) -> None:
    report = runs(trainer, "healthy").session.report
    silent = {rule: entry["reason"] for rule, entry in report["rules"].items() if entry["verdict"] == "not judged"}
    silent.pop("skipped-steps", None)  # no scaler in a healthy run
    assert set(silent.values()) <= set(declared_gaps(trainer).values())
    assert report["trainer"] == trainer
    assert report["steps"] == FAULTS["healthy"].steps


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_step_losses_are_those_of_the_script(runs: Any, trainer: str) -> None:
    mine, reference = (runs(t, "healthy").session.history("loss") for t in (trainer, "script"))
    assert [s for s, _ in mine] == list(range(1, FAULTS["healthy"].steps + 1))
    assert [v for _, v in mine] == pytest.approx([v for _, v in reference], rel=1e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_watched_weights_are_bit_identical_to_plain_ones(trainer: str, tmp_path: Path) -> None:
    plain = TOLD[trainer](Order(HEALTHY, tmp_path / "plain", watched=False)).weights
    watched = TOLD[trainer](Order(HEALTHY, tmp_path / "watched")).weights
    assert {name: torch.equal(watched[name], plain[name]) for name in plain} == dict.fromkeys(plain, True)


@pytest.mark.parametrize("fault", ["nan_loss", "nan_gradient"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_stop_ends_the_run_in_order_at_its_step(trainer: str, fault: str, tmp_path: Path) -> None:
    rule = FAULTS[fault].rule
    run = TOLD[trainer](Order(FAULTS[fault], tmp_path, rules=rules_with(rule, ["stop"])))
    report = run.session.report
    assert (report["stop"]["rule"], report["stop"]["step"], report["steps"]) == (rule, 12, 12)
    assert report["exit_code"] == 1
    assert report["exit_reason"] == "stopped"
    assert run.extra.get("ended") is None  # nothing was raised
    if trainer in GATES:
        assert run.finite
    else:
        assert "skip_update" in declared_gaps(trainer)


@pytest.mark.parametrize("trainer", GATES)
def test_a_skipped_update_leaves_the_run_going_with_finite_weights(trainer: str, tmp_path: Path) -> None:
    run = TOLD[trainer](Order(FAULTS["nan_gradient"], tmp_path, rules=rules_with("grads-not-finite", ["skip_update"])))
    assert run.finite
    assert run.session.report["steps"] == FAULTS["nan_gradient"].steps
    assert run.extra.get("ended") is None
    assert run.fired == [("grads-not-finite", 12)]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_requested_checkpoint_is_written_and_loads(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    fault = FAULTS["exploding_gradient"]
    order = Order(fault, tmp_path, rules=rules_with("exploding-gradient", ["checkpoint"]), record=True)
    run = TOLD[trainer](order)
    action = next(a for alert in run.session.alerts for a in alert.actions if a.action == "checkpoint")
    where = Path(action.data["path"])
    content = torch.load(where / "model.pt" if where.is_dir() else where, weights_only=False)
    saved = content.get("model", content.get("modules", [content]))[0] if "body.weight" not in content else content
    assert saved.keys() == run.weights.keys()
    assert run.session.report["steps"] == fault.steps
    others = [path for path in tmp_path.rglob("model.pt") if path.parent != where]
    assert len(others) <= 1  # the regular one at the end, and none besides


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_monitor_error_never_ends_training(trainer: str, tmp_path: Path) -> None:
    run = TOLD[trainer](Order(HEALTHY, tmp_path, callbacks=(Faulty(),)))
    assert run.model.step == HEALTHY.steps
    assert run.session.report["steps"] == HEALTHY.steps
    wanted = {"step_end", "before_update"} if trainer in GATES else {"step_end"}
    assert {entry["hook"] for entry in run.session.report["plugin_errors"]} == wanted


@pytest.mark.parametrize("trainer", TRAINERS)
def test_without_rules_nothing_is_attached(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer

    seen: set[tuple[bool, int]] = set()

    def look() -> None:
        seen.add((hasattr(torch.autograd.backward, "__wrapped__"), len(optimizer._global_optimizer_pre_hooks)))

    monkeypatch.setattr(Toy, "spy", staticmethod(look))
    run = TOLD[trainer](Order(replace(HEALTHY, steps=5), tmp_path, rules={"version": 1, "rules": {}}))
    assert seen == {(False, 0)}
    assert run.session.alerts == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_parameters_have_their_plain_names(trainer: str, tmp_path: Path) -> None:
    assert families(TOLD[trainer](Order(replace(HEALTHY, steps=3), tmp_path, rules=FAMILY))) == NAMES
