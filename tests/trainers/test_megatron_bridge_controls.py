"""Megatron Bridge: what can be asked of its loop, and how a run ends that was left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.run import current

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "drivers"))

import megatron_loop
import torch
from megatron_setup import WATCH, Model, callback, config, forward_step

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_requested_checkpoint_is_the_step_s_own_and_the_interval_is_given_back(tmp_path: Path) -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["checkpoint"]}}
    health, cfg = (
        callback({"version": 1, "rules": rules}),
        config(checkpoint={"save": str(tmp_path), "save_interval": 100}),
    )
    megatron_loop.pretrain(cfg, forward_step, callbacks=[health])
    action = health.alerts[0].actions[0]
    assert action.data["path"] == str(tmp_path / "iter_0000001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000006"]
    assert cfg.checkpoint.save_interval == 100


def test_a_checkpoint_cannot_be_had_where_megatron_saves_none() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["checkpoint"]}}
    health = callback({"version": 1, "rules": rules})
    megatron_loop.pretrain(config(), forward_step, callbacks=[health])
    assert "checkpoint.save is not set" in health.alerts[0].actions[0].text


def test_an_update_cannot_be_skipped_and_the_report_says_why() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["skip_update"]}}
    health = callback({"version": 1, "rules": rules})
    megatron_loop.pretrain(config(), forward_step, callbacks=[health])
    assert "run after the update" in health.alerts[0].actions[0].text


def test_a_coming_iteration_can_be_left_out() -> None:
    class Skip:
        def on_train_step_end(self, context: Any) -> None:
            if context.state.train_state.step == 0:
                health.skip_iteration(3)
                with pytest.raises(healthcheck.UsageError, match="has begun already; the next one is 2"):
                    health.skip_iteration(1)

    health, model = callback(), Model()
    with pytest.raises(healthcheck.UsageError, match="not begun"):
        health.skip_iteration(3)
    megatron_loop.pretrain(config([model], iterations=5), forward_step, callbacks=[health, Skip()])
    assert model.seen == 4
    assert [step for step, _ in health.session.history("loss")] == [1, 2, 4, 5]


def test_scaling_the_rate_reaches_the_schedule() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": [{"scale_lr": {"factor": 0.5}}]}}
    health = callback({"version": 1, "rules": rules})
    seen: list[Any] = []

    class Look:
        def on_train_end(self, context: Any) -> None:
            seen.extend([context.scheduler.max_lr, context.optimizer.param_groups[0]["lr"]])

    megatron_loop.pretrain(config(iterations=2), forward_step, callbacks=[health, Look()])
    assert seen == [0.005, 0.005]


def test_alerts_and_metrics_reach_its_loggers() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}}}
    health = callback({"version": 1, "rules": rules})
    state = megatron_loop.pretrain(config(logger={"log_interval": 2}), forward_step, callbacks=[health])
    assert ("healthcheck/alert/any", 1.0, 1) in state.tensorboard_logger.scalars
    assert [s for name, _, s in state.tensorboard_logger.scalars if name == "healthcheck/lr"] == [2, 4, 6]


@pytest.mark.parametrize("exit_by", [{"train": {"exit_interval": 2}}, {"rerun": {"exit_at": 3}}])
def test_megatron_s_own_exits_still_get_their_report(exit_by: dict[str, Any]) -> None:
    """Neither the interval (signal, duration) nor the rerun state machine fires ``on_train_end``."""
    health = callback()
    with pytest.raises(SystemExit), health:
        megatron_loop.pretrain(config(**exit_by), forward_step, callbacks=[health])
    assert health.report["steps"] == (2 if "train" in exit_by else 3)


def test_an_exception_in_the_loop_is_in_the_report() -> None:
    health = callback()
    with pytest.raises(ZeroDivisionError), health:
        megatron_loop.pretrain(config(), lambda batch, model: 1 / 0, callbacks=[health])
    assert health.report["exit_reason"] == "script failed"


def test_a_run_that_was_left_by_an_exception_does_not_disturb_the_next_one() -> None:
    left = callback()
    with pytest.raises(ZeroDivisionError):
        megatron_loop.pretrain(config(), lambda batch, model: 1 / 0, callbacks=[left])
    health = callback()
    megatron_loop.pretrain(config(), forward_step, callbacks=[health])
    assert health.report["steps"] == 6
    assert left.report is not None


class Broken(healthcheck.Callback):
    def on_step_end(self) -> None:
        raise RuntimeError("broken on purpose")


def test_an_evaluation_that_never_comes_after_training_keeps_nobody_else_waiting() -> None:
    """``do_valid`` says that there will be one; the report is written when somebody looks, or at the end."""
    cfg = config(dataset={"valid": [torch.ones(2, 3)]}, validation={"final": False})
    waiting, health = callback(), callback()
    megatron_loop.pretrain(cfg, forward_step, callbacks=[waiting])
    assert waiting.watch.report is None
    assert current.current() is None
    megatron_loop.pretrain(config(), forward_step, callbacks=[health])
    assert (waiting.watch.report or {})["steps"] == 6
    assert health.report["steps"] == 6


def test_a_plugin_s_error_is_kept_or_raised_as_the_user_chooses() -> None:
    health = callback(callbacks=(Broken(),))
    megatron_loop.pretrain(config(), forward_step, callbacks=[health])
    assert health.report["plugin_errors"][0]["error"] == "RuntimeError: broken on purpose"
    raising = callback({**WATCH, "settings": {"on_plugin_error": "raise"}}, callbacks=(Broken(),))
    with pytest.raises(RuntimeError, match="on purpose"), raising:
        megatron_loop.pretrain(config(), forward_step, callbacks=[raising])
