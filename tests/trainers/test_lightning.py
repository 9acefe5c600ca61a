"""The Trainer of Lightning: what only its adapter knows."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torch")

import lightning.pytorch as pl
import torch

import healthcheck
from healthcheck.trainers.lightning import HealthCheckCallback, attach
from healthcheck.trainers.lightning.callback import evaluation_results

pytestmark = [pytest.mark.slow, pytest.mark.framework("lightning"), pytest.mark.filterwarnings("ignore")]

RULES = {
    "version": 1,
    "rules": {
        "loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "norm": {"metric": "grad_norm", "when": {"above": 1e9}},
        "evaluations": {"metric": "eval.loss", "when": {"above": 1e9}},
    },
}
QUIET: dict[str, Any] = {"console": False, "record": False}


def data(n: int = 16) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(n, 4, generator=generator), torch.zeros(n, 1))
    return torch.utils.data.DataLoader(rows, batch_size=2)


class Toy(pl.LightningModule):
    def __init__(self, nan_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(4, 1)
        self.nan_at, self.calls = nan_at, 0

    def loss(self, batch: Any) -> Any:
        return (self.fc(batch[0]) - batch[1]).pow(2).mean()

    def training_step(self, batch: Any, index: int) -> Any:
        self.calls += 1
        return self.loss(batch) * (float("nan") if self.calls == self.nan_at else 1.0)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Closures(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Adversaries(Toy):
    """Manual optimization of two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        for optimizer, part in ((first, self.fc), (second, self.other)):
            loss = (part(batch[0]) - batch[1]).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.fc.parameters(), lr=0.01), torch.optim.SGD(self.other.parameters(), lr=0.02)]


def fit(folder: Path, callback: Any, module: Any, *, package: Any = pl, validation: Any = None, **given: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"max_steps": 8, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **given}
    trainer = package.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback is not None else [],
        **options,
    )
    trainer.fit(module, data(), validation)
    return trainer


def test_a_stop_ends_the_loop_in_the_trainers_own_way(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    trainer = fit(tmp_path, callback, Toy(nan_at=3))
    assert (trainer.global_step, str(trainer.state.status)) == (3, "TrainerStatus.FINISHED")
    assert all(bool(torch.isfinite(p).all()) for p in trainer.lightning_module.parameters())
    assert callback.exit_code == 1


def test_a_stop_does_not_wait_for_min_steps(tmp_path: Path) -> None:
    assert fit(tmp_path, HealthCheckCallback(RULES, **QUIET), Toy(nan_at=3), min_steps=7).global_step == 3


def test_several_optimizers_are_one_step_with_a_series_each(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    fit(tmp_path, callback, Adversaries(), max_steps=12)
    assert callback.report["steps"] == 6
    names = callback.session.history.series()
    assert {"grad_norm", "grad_norm[optimizer=1]", "loss", "loss[optimizer=1]"} <= set(names)
    assert [step for step, _ in callback.session.history("grad_norm[optimizer=1]")] == [1, 2, 3, 4, 5, 6]


def test_closures_that_run_many_times_are_one_step(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    fit(tmp_path, callback, Closures(), max_steps=4)
    assert [step for step, _ in callback.session.history("loss")] == [1, 2, 3, 4]


def test_the_sanity_check_is_no_evaluation(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Evaluations(healthcheck.Callback):
        def on_validation_end(self, event: Any) -> None:
            seen.append((event.dataset, event.step))

    callback = HealthCheckCallback(RULES, callbacks=[Evaluations()], **QUIET)
    fit(tmp_path, callback, Toy(), validation=[data(4), data(4)], num_sanity_val_steps=2, val_check_interval=4)
    assert seen == [("0", 4), ("1", 4), ("0", 8), ("1", 8)]
    assert "eval.loss[dataset=1]" in callback.session.history.series()


def test_metrics_and_alerts_reach_the_logger_at_their_own_step(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    fit(tmp_path, HealthCheckCallback(RULES, **QUIET), Toy(nan_at=5), logger=logger, log_every_n_steps=1)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {int(row["step"]): row["train/loss"] for row in rows if row.get("train/loss")}
    assert sorted(losses) == [1, 2, 3, 4, 5]
    assert losses[5] == "nan"
    assert [int(row["step"]) for row in rows if row.get("train/alert/loss-not-finite")] == [5]


def test_the_other_package_name_works_too_whichever_was_imported_first(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.fc(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = HealthCheckCallback(RULES, **QUIET)
    assert isinstance(callback, other.Callback)
    assert isinstance(callback, pl.Callback)
    assert callback.state_key == "HealthCheckCallback"
    fit(tmp_path, callback, Module(), package=other)
    assert callback.report["steps"] == 8


def test_an_error_of_the_module_ends_the_report_too(tmp_path: Path) -> None:
    class Failing(Toy):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 3:
                raise RuntimeError("the module's own error")
            return super().training_step(batch, index)

    callback = HealthCheckCallback(RULES, **QUIET)
    with pytest.raises(RuntimeError, match="own error"):
        fit(tmp_path, callback, Failing())
    assert callback.report["exception"] == "RuntimeError: the module's own error"
    assert healthcheck.current() is None


def test_two_callbacks_of_one_trainer_count_once(tmp_path: Path) -> None:
    first, second = HealthCheckCallback(RULES, **QUIET), HealthCheckCallback(**QUIET)

    class Both(HealthCheckCallback):
        pass

    third = Both(**QUIET)
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[first, third],
    )
    trainer.fit(Toy(), data())
    assert first.session is third.session
    assert first.report["steps"] == 4
    assert [step for step, _ in first.session.history("loss")] == [1, 2, 3, 4]
    assert second.session is None


def test_attach_is_for_trainers_that_exist(tmp_path: Path) -> None:
    session = healthcheck.open_session(target="test", rules=RULES, **QUIET)
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    callback = session.attach(trainer)
    assert attach(trainer) is callback
    trainer.fit(Toy(), data())
    assert [step for step, _ in session.history("loss")] == [1, 2, 3, 4]
    assert session.report is None  # whoever opened it ends it


def test_attach_to_something_else_says_what_is_known() -> None:
    session = healthcheck.open_session(target="test", rules=RULES, **QUIET)
    with pytest.raises(
        healthcheck.UsageError, match=r"attach\(\) cannot watch a list; it takes an object: .*Lightning"
    ):
        session.attach([])


SCRIPT = """
    import torch, lightning.pytorch as pl, logging
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    class Toy(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)
        def training_step(self, batch, index):
            return self.fc(batch[0]).pow(2).mean()
        def validation_step(self, batch, index):
            self.log("val_loss", self.fc(batch[0]).pow(2).mean())
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)
    CALLBACKS
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), 2)
    trainer = pl.Trainer(max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, val_check_interval=3, callbacks=callbacks)
    trainer.fit(Toy(), data, data)
"""
OWN = "from healthcheck.trainers.lightning import HealthCheckCallback; callbacks = [HealthCheckCallback()]"


@pytest.mark.parametrize("callbacks", ["callbacks = []", OWN])
def test_a_watched_script_is_counted_once_and_tells_epochs(play: Callable[..., Any], callbacks: str) -> None:
    played = play(SCRIPT.replace("CALLBACKS", callbacks), rules=RULES)
    assert played.code == 0
    assert played.steps() == [1, 2, 3, 4, 5, 6]
    assert played.steps("loss") == [1, 2, 3, 4, 5, 6]
    assert played.steps("eval_end") == [3, 6]
    assert [e.epoch for e in played.of("epoch_start")] == [0.0]
    assert played.session.report["trainer"] == "lightning"


AGAIN = """
    callbacks = []
    toy = Toy()
    for data in (data, data):
        pl.Trainer(max_epochs=6, logger=False, accelerator="cpu", enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False).fit(toy, data)
"""


def test_a_second_training_counts_on_and_its_new_optimizer_replaces_nothing(play: Callable[..., Any]) -> None:
    script = SCRIPT[: SCRIPT.index("    trainer = ")].replace("CALLBACKS", "") + AGAIN
    script = script.replace("optim.SGD", "optim.AdamW")
    rules = {
        "replaced": {"metric": "optimizer.replaced", "when": {"above": 0}},
        "jump": {"metric": "lr.jump", "when": {"above": 1.5}},
        "end": {"metric": "progress", "when": {"above": 1}},
        "loss": {"metric": "loss", "when": "nonfinite"},
    }
    played = play(script, rules={"version": 1, "rules": rules})
    assert played.code == 0
    assert played.steps() == played.steps("loss") == list(range(1, 73))
    assert [e.step for e in played.of("train_start")] == [1, 37]
    assert max(played.samples["progress"][:36]) == 1.0
    assert played.samples["progress"][36] < 0.6
    assert {e.optimizer_index for e in played.of("step_end")} == {0}
    assert played.session.alerts == []


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"val_loss": 1.0, "train_loss": 2.0}, {"": {"eval.loss": 1.0}}),
        ({"val_loss/dataloader_idx_1": 2.0}, {"1": {"eval.loss": 2.0}}),
        ({"train_loss": 2.0}, {}),
    ],
)
def test_evaluation_results_are_read_with_their_loader(metrics: dict[str, float], found: Any) -> None:
    assert evaluation_results(metrics) == found
