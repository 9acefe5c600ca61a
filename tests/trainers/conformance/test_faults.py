"""Every trainer finds the same faults, by the same rule, at the same step; gaps are declared or they are bugs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drivers import DRIVERS, FAULTS, Order, Run

PACKAGE = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
TRAINERS = list(DRIVERS)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def declared_gaps(trainer: str) -> dict[str, str]:
    """What the adapter says that it cannot show."""
    if trainer in ("loop", "script"):
        from healthcheck.instrument.controls import GAPS
        from healthcheck.instrument.loop import LOOP_GAPS

        return {**GAPS, **(LOOP_GAPS if trainer == "loop" else {})}
    return dict(importlib.import_module(f"healthcheck.trainers.{trainer}").CAPABILITIES.gaps)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``runs(trainer, fault)``: each pair is run once."""

    @cache
    def run(trainer: str, fault: str) -> Run:
        if trainer in PACKAGE:
            pytest.importorskip(PACKAGE[trainer])
        folder: Path = tmp_path_factory.mktemp(f"{trainer}-{fault}")
        return DRIVERS[trainer](Order(FAULTS[fault], folder))

    return run


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trainer", TRAINERS)
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
        assert run.session.report["rules"][wanted.rule]["verdict"] == "not judged"
        return
    steps = [step for name, step in run.fired if name == wanted.rule]
    assert steps, f"{trainer} did not find {fault}: {run.fired}"
    if wanted.step is not None:
        assert steps[0] == wanted.step
    if fault == "memory_growth":
        assert wanted.at < steps[0] <= wanted.at + 30  # a busy machine returns memory late


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "memory_growth"])
@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name != "script"])
def test_all_trainers_raise_the_same_alerts_as_the_unmodified_script(runs: Any, trainer: str, fault: str) -> None:
    mine, reference = runs(trainer, fault).fired, runs("script", fault)
    if "loss_before_update" in declared_gaps(trainer):  # too late to explain what the gradients said in that step
        explained = {(a.rule, a.fired_step) for a in reference.session.alerts if a.explained_by}
        mine = [alert for alert in mine if alert not in explained]
    assert mine == reference.fired


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_rule_is_judged_or_its_gap_is_declared(runs: Any, trainer: str) -> None:
    """A rule without data in a healthy run must be one whose cause is not there, or a gap of the table."""
    report = runs(trainer, "healthy").session.report
    silent = {rule: entry["reason"] for rule, entry in report["rules"].items() if entry["verdict"] == "not judged"}
    not_there = {"skipped-steps"}  # no scaler in a healthy run
    gaps = declared_gaps(trainer)
    assert {rule for rule in silent if rule not in not_there and silent[rule] not in gaps.values()} == set()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_report_names_the_trainer_and_its_capabilities(runs: Any, trainer: str) -> None:
    report = runs(trainer, "healthy").session.report
    assert report["trainer"] == trainer
    assert report["steps"] == FAULTS["healthy"].steps
    assert {"stop", "skip_update", "checkpoint", "scale_lr"} <= set(report["capabilities"]["controls"])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_step_losses_are_those_of_the_plain_loop(runs: Any, trainer: str) -> None:
    mine, reference = (runs(t, "healthy").session.history("loss") for t in (trainer, "loop"))
    assert [s for s, _ in mine] == list(range(1, FAULTS["healthy"].steps + 1))
    assert [v for _, v in mine] == pytest.approx([v for _, v in reference], rel=1e-6)
