"""torchtitan: a mixin over its Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.run import current
from healthcheck.trainers.torchtitan import HealthCheckTrainer

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "drivers"))

import titan_loop
import torch
from source_order import calls, real_files
from told import Model, batches

pytestmark = pytest.mark.usefixtures("nothing_left")
FILES = real_files("torchtitan/trainer.py")
WATCH = {
    "version": 1,
    "rules": {
        "loss": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "norm": {"metric": "grad_norm", "when": {"above": 1e6}},
        "eval": {"metric": "eval.loss", "when": {"above": 1e6}},
    },
}


def train(rules: Any = WATCH, model: Any = None, **given: Any) -> Any:
    options = {"rules": rules, "console": False, "record": False, **given.pop("options", {})}
    watched: Any = type("Watched", (HealthCheckTrainer, titan_loop.Trainer), {"healthcheck": options})
    first = given.pop("first", 0)
    trainer = watched(model or Model(), given.pop("batches", None) or batches(), **{"steps": 6, **given})
    trainer.step = first
    trainer.train()
    return trainer


def test_steps_have_the_trainer_s_numbers_and_losses() -> None:
    trainer = train(accumulate=2, max_norm=1.0)
    history = trainer.health.session.history("loss")
    assert [step for step, _ in history] == [1, 2, 3, 4, 5, 6]
    assert [v for _, v in history] == pytest.approx([line["loss"] for line in trainer.metrics_processor.lines])
    assert trainer.health.report["internal_errors"] == []


@pytest.mark.parametrize("log_freq", [1, 100])
def test_a_stop_keeps_the_bad_update_out_and_saves_a_last_checkpoint(tmp_path: Path, log_freq: int) -> None:
    """On a logging step torchtitan would have raised about the same loss; the end is orderly all the same."""
    trainer = train(model=Model(bad=3), folder=str(tmp_path), log_freq=log_freq)
    assert trainer.step == 3
    assert trainer.health.report["stop"]["step"] == 3
    assert trainer.health.exit_code == 1
    assert bool(trainer.model_parts[0].weight.isfinite().all())
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_without_a_rule_that_stops_its_own_check_still_raises() -> None:
    rules = {"loss": {"metric": "loss", "when": "nonfinite", "severity": "error"}}
    with pytest.raises(RuntimeError, match="not finite"):
        train({"version": 1, "rules": rules}, model=Model(bad=3))


def test_another_error_is_never_swallowed_after_a_stop() -> None:
    class Fails(Model):
        def forward(self, x: Any) -> Any:
            if self.seen == 1:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().forward(x)

    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["stop"]}}
    with pytest.raises(RuntimeError, match="device-side"):
        train({"version": 1, "rules": rules}, model=Fails(), accumulate=2)


def test_data_that_runs_out_ends_the_run_at_its_last_whole_step() -> None:
    trainer = train(batches=[{"x": torch.ones(2, 3)}] * 3)
    assert trainer.health.report["steps"] == 3
    assert trainer.health.exit_code == 0


def test_validations_are_heard() -> None:
    trainer = train(validation=[{"x": torch.ones(2, 3)}], validate_every=3)
    assert [step for step, _ in trainer.health.session.history("eval.loss")] == [3, 6]


def test_checkpoints_carry_the_detectors_and_a_resume_goes_on(tmp_path: Path) -> None:
    train(folder=str(tmp_path), interval=2, steps=4)
    assert json.loads((tmp_path / "step-4" / "healthcheck-state.json").read_text())["step"] == 4
    again = train(folder=str(tmp_path), first=4)
    assert again.health.report["resumed_from"] == 4
    assert [step for step, _ in again.health.session.history("loss")] == [5, 6]


def test_a_requested_checkpoint_is_the_step_s_own(tmp_path: Path) -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["checkpoint"]}}
    trainer = train({"version": 1, "rules": rules}, folder=str(tmp_path))
    assert trainer.health.alerts[0].actions[0].data["path"] == str(tmp_path / "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-6"]
    assert trainer.checkpointer.interval == 500


def test_metrics_and_alerts_are_logged_with_the_next_step_s_own() -> None:
    """The Trainer logs inside of its step, when that has not ended yet."""
    rules = {"any": {"metric": "update_ratio", "when": {"above": 0}}}
    lines = train({"version": 1, "rules": rules}).metrics_processor.lines
    assert lines[1]["healthcheck/alert/any"] == 1.0
    assert lines[2]["healthcheck/update_ratio"] > 0  # one value makes no chart yet


def test_several_optimizers_of_a_container_are_one_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).square().mean()}

    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    trainer = train(model=Both(), optimizers=optimizers)
    assert trainer.health.report["steps"] == 6
    assert [step for step, _ in trainer.health.session.history("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_rules_opens_one_session_and_leaves_none() -> None:
    assert train({"version": 1, "rules": {}}).health.report["rules"] == {}
    assert current.current() is None


def test_under_a_watched_script_its_steps_are_counted_once() -> None:
    from healthcheck.instrument.script import InProcess

    session = healthcheck.open_session(target="x", rules=WATCH, console=False, record=False)
    with InProcess(session):
        trainer = train(rules=None)
    assert trainer.health.session is session
    assert [step for step, _ in session.history("loss")] == [1, 2, 3, 4, 5, 6]


TRAIN = ("load", "should_continue_training", "step", "train_step", "save", "should_validate", "validate")
STEP = ("zero_grad", "get_metrics", "should_log", "forward_backward_step", "clip_grad_norm_", "maybe_wait_for_staging")
STEP = (*STEP, "isfinite", "RuntimeError", "log")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parents[1].name)
def test_the_driver_has_the_order_of_the_real_trainer(path: Path) -> None:
    mine = Path(titan_loop.__file__)
    theirs = calls(path, "train", TRAIN)
    assert [n for n in theirs if n != "step"] == [n for n in calls(mine, "train", TRAIN) if n != "step"]
    assert calls(path, "train_step", STEP) == calls(mine, "train_step", STEP)
