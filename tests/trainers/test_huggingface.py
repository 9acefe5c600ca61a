"""The Trainer of transformers: what only its adapter knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import healthcheck
from healthcheck.core.errors import RuleFileError
from healthcheck.trainers.huggingface import HealthCheckCallback, attach
from healthcheck.trainers.huggingface.callback import evaluation_results
from healthcheck.trainers.huggingface.memory import MemoryMonitoringCallback

pytestmark = [pytest.mark.slow, pytest.mark.framework("transformers"), pytest.mark.filterwarnings("ignore")]

RULES = {
    "version": 1,
    "rules": {
        "loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["warn"]},
        "evaluations": {"metric": "eval.loss", "when": {"above": 1e9}},
    },
}
QUIET: dict[str, Any] = {"console": False, "record": False}


class Model(torch.nn.Module):
    def __init__(self, nan_at: int = 0, fail_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(4, 1)
        self.calls, self.nan_at, self.fail_at = 0, nan_at, fail_at

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.fc(x)
        loss = (logits - labels).pow(2).mean()
        if self.training:
            self.calls += 1
            if self.calls == self.fail_at:
                raise RuntimeError("the model's own error")
            if self.calls == self.nan_at:
                loss = loss * float("nan")
        return {"loss": loss, "logits": logits}


def data(n: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.zeros(1)} for _ in range(n)]


def trainer_for(folder: Path, callbacks: list[Any], model: Any = None, evaluation: Any = None, **given: Any) -> Any:
    options = {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **given,
    }
    arguments = TrainingArguments(str(folder), **options)
    return Trainer(model or Model(), arguments, train_dataset=data(32), eval_dataset=evaluation, callbacks=callbacks)


def test_the_true_loss_is_judged_where_the_log_hides_a_nan(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    trainer = trainer_for(tmp_path, [callback], Model(nan_at=3), max_steps=3)
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    assert [(a.rule, a.fired_step) for a in callback.alerts] == [("loss-not-finite", 3)]
    assert callback.exit_code == 1


def test_accumulated_losses_add_up_to_what_the_trainer_logs(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    trainer = trainer_for(tmp_path, [callback], gradient_accumulation_steps=2, max_steps=4)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [value for _, value in callback.session.history("loss")] == pytest.approx(logged, abs=5e-5)  # 4.45 rounds


def test_evaluations_of_several_data_sets_are_told_apart(tmp_path: Path) -> None:
    seen: list[tuple[str, int, float | None]] = []

    class Epochs(healthcheck.Callback):
        def on_eval_end(self, event: Any) -> None:
            seen.append((event.dataset, event.step, event.epoch))

    callback = HealthCheckCallback(RULES, callbacks=[Epochs()], **QUIET)
    evaluation = {"news": data(4), "books": data(4)}
    trainer_for(tmp_path, [callback], evaluation=evaluation, eval_strategy="steps", eval_steps=4).train()
    assert seen == [("news", 4, 0.25), ("books", 4, 0.25), ("news", 8, 0.5), ("books", 8, 0.5)]
    assert {"eval.loss[dataset=news]", "eval.loss[dataset=books]"} <= set(callback.session.history.series())


def test_loggers_see_metrics_and_alerts(tmp_path: Path) -> None:
    class Logger(TrainerCallback):
        def __init__(self) -> None:
            self.names: set[str] = set()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.names |= set(logs)

    logger = Logger()
    trainer = trainer_for(tmp_path, [logger, HealthCheckCallback(RULES, **QUIET)], Model(nan_at=3), max_steps=4)
    trainer.train()
    assert {"healthcheck/loss", "healthcheck/alert/loss-not-finite"} <= logger.names


def test_a_stop_ends_the_loop_in_the_trainers_own_way(tmp_path: Path) -> None:
    rules = {"version": 1, "rules": {"stop": {"metric": "loss", "when": "nonfinite", "then": ["stop"]}}}
    callback = HealthCheckCallback(rules, **QUIET)
    trainer = trainer_for(tmp_path, [callback], Model(nan_at=3))
    result = trainer.train()
    assert result.global_step == 3
    assert trainer.state.log_history[-1]["train_runtime"] >= 0  # the end of a whole run
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


def test_an_error_of_the_model_ends_the_report_too(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    trainer = trainer_for(tmp_path, [callback], Model(fail_at=3))
    with pytest.raises(RuntimeError, match="own error"):
        trainer.train()
    assert callback.report["exception"] == "RuntimeError: the model's own error"
    assert callback.report["steps"] == 2
    assert healthcheck.current() is None


def test_rules_with_mistakes_are_told_before_anything_runs(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [HealthCheckCallback({"version": 1, "rules": {"x": {"metrik": "loss"}}}, **QUIET)])
    with pytest.raises(RuleFileError, match="metrik"):
        trainer.train()
    assert trainer.model.calls == 0


def test_attach_is_for_trainers_that_exist(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, [])
    callback = attach(trainer, rules=RULES, **QUIET)
    assert attach(trainer) is callback
    trainer.train()
    assert callback.report["steps"] == 8


def test_two_trainings_with_one_callback_are_two_runs(tmp_path: Path) -> None:
    callback = HealthCheckCallback(RULES, **QUIET)
    trainer = trainer_for(tmp_path, [callback], max_steps=3)
    trainer.train()
    first = callback.session
    trainer.train()
    assert callback.session is not first
    assert callback.report["steps"] == 3


SCRIPT = """
    import tempfile, torch
    from transformers import Trainer, TrainingArguments
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)
        def forward(self, x, labels):
            return {"loss": (self.fc(x) - labels).pow(2).mean()}
    CALLBACKS
    data = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(8)]
    arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, use_cpu=True, save_steps=3, eval_strategy="steps", eval_steps=3)
    Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks).train()
"""
OWN = "from healthcheck.trainers.huggingface import HealthCheckCallback; callbacks = [HealthCheckCallback()]"


@pytest.mark.parametrize("callbacks", ["callbacks = []", OWN])
def test_a_watched_script_is_counted_once_and_tells_epochs(play: Callable[..., Any], callbacks: str) -> None:
    played = play(SCRIPT.replace("CALLBACKS", callbacks), rules=RULES)
    assert played.code == 0
    assert played.steps() == [1, 2, 3, 4, 5, 6]
    assert played.steps("loss") == [1, 2, 3, 4, 5, 6]
    assert played.steps("eval_end") == [3, 6]
    assert played.steps("checkpoint_saved") == [3, 6]
    assert played.steps("train_end") == [6]
    assert [e.epoch for e in played.of("epoch_start")] == [0.0, 1.0]
    assert played.session.report["trainer"] == "huggingface"


class MockTrainer:
    """Stands in for the Trainer with objects that know nothing."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.state, self.args, self.control = (type("Empty", (), {})() for _ in range(3))

    def test_all_callbacks(self) -> None:
        for name in (
            "on_init_end",
            "on_train_begin",
            "on_epoch_begin",
            "on_step_begin",
            "on_step_end",
            "on_log",
            "on_evaluate",
            "on_prediction_step",
            "on_save",
            "on_epoch_end",
            "on_train_end",
        ):
            getattr(self.callback, name)(self.args, self.state, self.control)


def test_the_memory_callback_stands_every_event_of_a_mock() -> None:
    callback = MemoryMonitoringCallback(**QUIET)
    MockTrainer(callback).test_all_callbacks()
    assert callback.callback_errors == []
    assert [e.event_type for e in callback.memory_history][:3] == ["init_end", "train_begin", "epoch_begin"]


def test_the_memory_callback_keeps_every_epoch_in_a_real_trainer(tmp_path: Path) -> None:
    callback = MemoryMonitoringCallback(**QUIET)
    options = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"}
    trainer_for(tmp_path, [callback], evaluation=data(4), **options).train()
    first, second = callback.epoch_memory_history
    assert (first.epoch, second.epoch) == (0, 1)
    assert first.memory_delta_gb == pytest.approx(first.end_memory_gb - first.start_memory_gb)
    assert second.peak_memory_gb >= second.start_memory_gb > 0
    assert first.timestamp_start < first.timestamp_end <= second.timestamp_start
    assert {"prediction_step", "evaluate", "log"} <= {e.event_type for e in callback.memory_history}
    assert "memory.at[event=eval_step]" in callback.session.history.series()


def test_a_memory_error_of_the_callback_cleans_up_and_is_kept(tmp_path: Path) -> None:
    class Optimizer:
        calls = 0

        def cleanup_gpu_memory(self) -> None:
            self.calls += 1

    class Log:
        def __init__(self) -> None:
            self.lines: list[Any] = []

        def warning(self, *given: Any) -> None:
            self.lines.append(given)

    class Broken(MemoryMonitoringCallback):
        def _see(self, name: str, state: Any) -> None:
            super()._see(name, state)
            if name == "on_step_end" and self.step_count == 3:
                raise RuntimeError("CUDA error: out of memory")

    optimizer, log = Optimizer(), Log()
    callback = Broken(optimizer, log, **QUIET)
    trainer = trainer_for(tmp_path, [callback])
    assert trainer.train().global_step == 8
    assert optimizer.calls == 1
    (entry,) = callback.report["internal_errors"]
    assert (entry["method"], entry["step"], entry["epoch"]) == ("on_step_end", 3, pytest.approx(2 / 16))
    assert log.lines[0][2]["method"] == "on_step_end"


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"eval_loss": 1.0, "eval_runtime": 0.1, "epoch": 1.0}, ("", {"loss": 1.0})),
        ({"eval_news_loss": 1.0, "eval_news_runtime": 0.1}, ("news", {"loss": 1.0})),
        ({"eval_loss": 1.0, "eval_rewards/margins": 0.5}, ("", {"loss": 1.0, "rewards/margins": 0.5})),
    ],
)
def test_evaluation_results_are_read_with_their_data_set(metrics: dict[str, float], found: Any) -> None:
    assert evaluation_results(metrics, "eval") == found
