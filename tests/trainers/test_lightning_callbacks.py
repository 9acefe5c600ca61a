"""The six callbacks by their documented names, parameters and defaults, in a real Lightning Trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torch")

import lightning.pytorch as pl
import torch

from healthcheck.core.text import time_left
from healthcheck.trainers.lightning.single import (
    AnomalyDetectorCallback,
    GradientMonitorCallback,
    LossMonitorCallback,
    MemoryMonitorCallback,
    ThroughputMonitorCallback,
    TrainingDashboardCallback,
    TrainingHealthCallback,
)

pytestmark = [pytest.mark.slow, pytest.mark.framework("lightning"), pytest.mark.filterwarnings("ignore")]
QUIET = {"console": False, "record": False}


class Toy(pl.LightningModule):
    """Linear regression; ``spoil(batch_index, loss)`` may change the loss of one batch."""

    def __init__(self, spoil: Callable[[int, Any], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(4, 1)
        self.spoil = spoil

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.fc(batch[0]) - batch[1]).pow(2).mean()
        return self.spoil(index, loss) if self.spoil is not None else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def loader(n: int) -> Any:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(n * 4, 4), torch.randn(n * 4, 1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(folder: Path, callbacks: list[Any], steps: int, spoil: Any = None, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Toy(spoil), loader(steps))
    return trainer


def at(step: int, factor: float) -> Callable[[int, Any], Any]:
    return lambda index, loss: loss * factor if index + 1 == step else loss


def everything() -> list[Any]:
    return [
        GradientMonitorCallback(log_interval=1, **QUIET),
        MemoryMonitorCallback(log_interval=1),
        ThroughputMonitorCallback(log_interval=1),
        LossMonitorCallback(log_interval=1),
        AnomalyDetectorCallback(),
        TrainingDashboardCallback(),
    ]


def test_all_six_are_one_session_and_log_their_documented_names(tmp_path: Path) -> None:
    callbacks = everything()
    trainer = fit(tmp_path, callbacks, 30, gradient_clip_val=0.5)
    assert len({id(c.session) for c in callbacks}) == 1
    assert callbacks[0].report["steps"] == 30
    assert callbacks[0].report["internal_errors"] == []
    logged = {name for name in trainer.logged_metrics if name.startswith("train/")}
    assert logged >= {
        "train/grad_norm",
        "train/grad_norm_avg",
        "train/clip_rate",
        "train/total_clip_events",
        "train/avg_clip_ratio",
        "train/memory_current_mb",
        "train/memory_peak_mb",
        "train/step_time",
        "train/eta",
        "train/progress_pct",
        "train/loss_avg",
    }
    assert trainer.logged_metrics["train/progress_pct"] == pytest.approx(100.0)


def test_a_gradient_explosion_is_found_at_three_standard_deviations(tmp_path: Path) -> None:
    callback = GradientMonitorCallback(**QUIET)
    fit(tmp_path, [callback], 40, at(35, 1e4))
    assert [(a.rule, a.fired_step) for a in callback.alerts if a.fired_step == 35] == [("gradient-explosion", 35)]


def test_a_loss_spike_is_not_judged_before_twenty_losses(tmp_path: Path) -> None:
    early = LossMonitorCallback(**QUIET)
    fit(tmp_path, [early], 15, at(12, 1e4))
    assert early.alerts == []
    sensitive = LossMonitorCallback(loss_spike_threshold=2.0, min_loss_history_for_detection=10, **QUIET)
    fit(tmp_path, [sensitive], 15, at(12, 1e4))
    assert [(a.rule, a.fired_step) for a in sensitive.alerts] == [("loss-spike", 12)]


def test_a_nan_is_a_critical_warning_with_advice_and_stops_nothing(tmp_path: Path) -> None:
    callback = AnomalyDetectorCallback(**QUIET)
    trainer = fit(tmp_path, [callback], 8, at(5, float("nan")))
    assert trainer.global_step == 8
    first = callback.alerts[0]
    assert (first.rule, first.fired_step, str(first.severity)) == ("loss-not-finite", 5, "error")
    assert "learning rate" in first.hint


def test_only_what_is_composed_is_judged(tmp_path: Path) -> None:
    callback = ThroughputMonitorCallback(warmup_steps=5, log_interval=1, **QUIET)
    fit(tmp_path, [callback], 12, at(5, float("nan")))
    assert callback.alerts == []
    assert callback.report["rules"] == {}
    assert callback.eta == "0s"


def test_the_old_callback_still_works_and_says_that_it_is_deprecated(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="TrainingHealthCallback is deprecated"):
        callback = TrainingHealthCallback(
            log_interval=10, gradient_norm_history_size=100, enable_dashboard=True, **QUIET
        )
    trainer = fit(tmp_path, [callback], 40, at(35, float("nan")))
    assert "loss-not-finite" in {a.rule for a in callback.alerts}
    assert "train/loss_avg" in trainer.logged_metrics


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (
            GradientMonitorCallback,
            {
                "log_interval": 100,
                "gradient_norm_history_size": 100,
                "grad_explosion_threshold": 3.0,
                "min_grad_history_for_detection": 20,
            },
        ),
        (MemoryMonitorCallback, {"log_interval": 100}),
        (ThroughputMonitorCallback, {"log_interval": 100, "step_time_history_size": 20, "warmup_steps": 10}),
        (
            LossMonitorCallback,
            {
                "log_interval": 100,
                "loss_history_size": 100,
                "loss_spike_threshold": 3.0,
                "min_loss_history_for_detection": 20,
            },
        ),
        (TrainingDashboardCallback, {"refresh_rate": 100, "enable_dashboard": True}),
    ],
)
def test_parameters_and_defaults_are_the_documented_ones(kind: Any, defaults: dict[str, Any]) -> None:
    found = {p.name: p.default for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert found == defaults


@pytest.mark.parametrize(("seconds", "words"), [(9240, "2h 34m"), (312, "5m 12s"), (42, "42s"), (-1, "0s")])
def test_the_time_left_is_written_as_documented(seconds: float, words: str) -> None:
    assert time_left(seconds) == words


def test_the_names_are_found_beside_the_adapter_too() -> None:
    pytest.importorskip("transformers")
    from healthcheck.trainers import huggingface, lightning
    from healthcheck.trainers.huggingface import memory as huggingface_memory

    assert lightning.TrainingHealthCallback is TrainingHealthCallback
    assert huggingface.MemoryMonitoringCallback is huggingface_memory.MemoryMonitoringCallback
    with pytest.raises(AttributeError, match="NoSuchCallback"):
        _ = lightning.NoSuchCallback


def test_an_average_is_not_a_number_at_the_step_that_was_none_and_a_number_again_after_it() -> None:
    callback = LossMonitorCallback(log_interval=1, **QUIET)
    callback.loss_history.clear()
    callback.loss_history.extend([1.0, float("nan"), 3.0])
    assert callback.values() == {"loss_avg": 2.0}
    callback.loss_history.append(float("nan"))
    assert str(callback.values()["loss_avg"]) == "nan"


def test_a_callback_that_is_looked_for_in_the_package_is_found_by_its_message() -> None:
    import healthcheck

    with pytest.raises(AttributeError, match=r"from healthcheck\.trainers\.huggingface import HealthCheckCallback"):
        _ = healthcheck.HealthCheckCallback
