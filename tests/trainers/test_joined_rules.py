"""Rules of callbacks, of ``watch()`` and of the run in one process: layers of one rule set, of which nothing is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning.pytorch as pl
import torch

import healthcheck
from healthcheck.core.errors import RuleFileError, UsageError
from healthcheck.instrument.script import InProcess
from healthcheck.run.ending import Ending
from healthcheck.trainers.lightning import (
    AnomalyDetectorCallback,
    GradientMonitorCallback,
    HealthCheckCallback,
    LossMonitorCallback,
    TrainingHealthCallback,
)

pytestmark = [pytest.mark.slow, pytest.mark.framework("lightning"), pytest.mark.filterwarnings("ignore")]
QUIET = {"console": False, "record": False}
BOTH = {("loss-spike", 35), ("gradient-explosion", 35)}
"""What the thresholds of the user's own callbacks find."""


class Toy(pl.LightningModule):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = torch.nn.Linear(4, 1), factor

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
        return loss * self.factor if index + 1 == 35 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(folder: Path, callbacks: list[Any], factor: float = 1e4) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(160, 4), torch.randn(160, 1))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_steps=40,
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Toy(factor), torch.utils.data.DataLoader(data, batch_size=4))
    return trainer


@contextmanager
def run_with(rules: Any, **options: Any) -> Iterator[Any]:
    """What ``healthcheck run`` and a watched test do, in this process."""
    session = healthcheck.open_session(target="train.py", rules=rules, **QUIET, **options)
    try:
        with InProcess(session):
            yield session
    finally:
        session.finish(Ending())


def monitors() -> list[Any]:
    return [GradientMonitorCallback(**QUIET), LossMonitorCallback(**QUIET), AnomalyDetectorCallback(**QUIET)]


@pytest.mark.parametrize("run", [None, "healthcheck:recommended"])
@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param(monitors, id="monitors alone"),
        pytest.param(lambda: [HealthCheckCallback(**QUIET), *monitors()], id="behind a HealthCheckCallback"),
        pytest.param(lambda: [*monitors(), HealthCheckCallback(**QUIET)], id="before a HealthCheckCallback"),
        pytest.param(lambda: [TrainingHealthCallback(enable_dashboard=False, **QUIET)], id="the old one of all six"),
    ],
)
def test_both_thresholds_of_the_user_fire_in_every_combination(
    run: str | None, callbacks: Callable[[], list[Any]], tmp_path: Path
) -> None:
    made = callbacks()
    with run_with(run) if run else nullcontext():
        fit(tmp_path, made)
    assert {(alert.rule, alert.fired_step) for alert in made[0].alerts} >= BOTH
    assert {id(callback.session) for callback in made} == {id(made[0].session)}
    assert made[0].report["internal_errors"] == []
    judged = made[0].report["rules"]
    if run or any(type(callback) is HealthCheckCallback for callback in made):
        assert {"spike", "not-learning", "part-does-not-train"} <= judged.keys()  # and those that are found
    else:
        assert "spike" not in judged


def test_a_monitor_that_warns_of_nan_does_not_weaken_the_rule_that_stops(tmp_path: Path) -> None:
    with run_with("healthcheck:recommended") as session:
        trainer = fit(tmp_path, [AnomalyDetectorCallback(**QUIET)], float("nan"))
    assert trainer.global_step < 40
    assert session.report["stop"]["rule"] == "loss-not-finite"


def test_rules_of_a_callback_and_of_watch_join_the_run(tmp_path: Path) -> None:
    own = {"too-high": {"metric": "loss", "when": {"above": 1000}}}
    callback = HealthCheckCallback(rules=own, metrics=("update_ratio",), **QUIET)
    with run_with("healthcheck:recommended") as session:
        healthcheck.watch(rules={"tiny": {"metric": "grad_norm", "when": {"above": 1e3}}})
        fit(tmp_path, [callback])
    assert callback.session is session
    assert {("too-high", 35), ("tiny", 35)} <= {(alert.rule, alert.fired_step) for alert in session.alerts}
    assert session.history("update_ratio", 1)


def test_the_record_holds_all_rules_so_that_a_replay_judges_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    session = healthcheck.open_session(target="train.py", rules="healthcheck:recommended", console=False)
    with InProcess(session):
        fit(tmp_path, [LossMonitorCallback(**QUIET)])
    session.finish(Ending())
    assert session.info.run_dir is not None
    assert '"loss-spike"' in (session.info.run_dir / "rules.yaml").read_text()


def test_a_rule_that_joins_later_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    """Two trainings in one run: the second one brings a rule of its own."""
    with run_with({"high": {"metric": "loss", "when": {"above": 1000}}}) as session:
        fit(tmp_path, [HealthCheckCallback(**QUIET)])
        second = HealthCheckCallback(rules={"second": {"metric": "loss", "when": {"above": 1000}}}, **QUIET)
        fit(tmp_path, [second])
    found = [(alert.rule, alert.fired_step) for alert in session.alerts]
    assert found[0] == ("high", 35)
    assert {("high", 75), ("second", 75)} <= set(found)
    assert next(step for rule, step in found if rule == "second") == 75
    assert {rule: body["verdict"] for rule, body in session.report["rules"].items()} == {
        "high": "warned",
        "second": "warned",
    }


CONFLICTS = {
    "another threshold": {"rules": {"high": {"metric": "loss", "when": {"above": 5}}}},
    "switched off": {"rules": {"high": "off"}},
    "switched off by a profile": {"rules": {"profiles": {"slow": {"defaults": {"enabled": False}}}, "rules": {}}},
    "another mode": {"settings": {"mode": "act"}},
    "another profile": {"profile": "quick"},
}


@pytest.mark.parametrize("contradiction", CONFLICTS)
def test_a_contradiction_between_two_layers_is_an_error_before_training(contradiction: str, tmp_path: Path) -> None:
    first = {"profiles": {"quick": {}, "slow": {}}, "rules": {"high": {"metric": "loss", "when": {"above": 3}}}}
    callback = HealthCheckCallback(**CONFLICTS[contradiction], **QUIET)
    with (
        run_with(first, profile="slow", settings={"mode": "observe"}) as session,
        pytest.raises((RuleFileError, UsageError)) as raised,
    ):
        fit(tmp_path, [callback])
    assert session.step == 0
    if contradiction == "another threshold":
        assert "conflict" in str(raised.value)
        assert "rules of HealthCheckCallback" in str(raised.value)


def test_two_layers_that_say_the_same_are_no_contradiction(tmp_path: Path) -> None:
    rules = {"high": {"metric": "loss", "when": {"above": 1000}}}
    with run_with(rules) as session:
        fit(tmp_path, [HealthCheckCallback(rules=dict(rules), **QUIET)])
    assert (session.alerts[0].rule, session.alerts[0].fired_step) == ("high", 35)
    assert session.report["rules"].keys() == {"high"}
