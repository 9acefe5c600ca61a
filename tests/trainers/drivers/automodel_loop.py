"""NeMo AutoModel's recipe loop on a toy.

Copied from version 0.7.0: the order of calls in ``run_train_validation_loop``
(``nemo_automodel/recipes/llm/train_ft.py``), the counting of its ``StepScheduler``
(``components/training/step_scheduler.py``), the names and signatures of what a subclass overrides, and
that what a recipe is given is cleared of gradients before its metrics are logged. Replaced: everything
that computes, and ``setup``. ``test_automodel.py`` compares the order with the real file where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class MetricsSample:
    step: int
    epoch: int
    metrics: dict[str, Any] = field(default_factory=dict)
    timestamp: str = "2026-01-01T00:00:00.000Z"


class StepScheduler:
    """Counts from 0 while a step is made; a step is ``grad_acc_steps`` batches."""

    def __init__(self, dataloader: Any, cfg: Any) -> None:
        self.dataloader, self.grad_acc_steps = dataloader, cfg.grad_acc_steps
        self.max_steps, self.num_epochs = cfg.max_steps, cfg.num_epochs
        self.val_every_steps, self.ckpt_every_steps = cfg.val_every_steps, cfg.ckpt_every_steps
        self.step, self.epoch = cfg.start_step, 0
        self.sigterm_flag = False

    def __iter__(self) -> Iterator[list[Any]]:
        if self.step >= self.max_steps:
            return
        batch_buffer = []
        for batch in self.dataloader:
            batch_buffer.append(batch)
            if len(batch_buffer) == self.grad_acc_steps:
                yield batch_buffer
                self.step += 1
                batch_buffer = []
                if self.step >= self.max_steps or self.sigterm_flag:
                    return
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def is_val_step(self) -> bool:
        every = self.val_every_steps
        return bool(every) and self.step % every == every - 1 and not self.sigterm_flag

    @property
    def is_ckpt_step(self) -> bool:
        every = self.ckpt_every_steps
        return (bool(every) and self.step % every == every - 1) or self.step + 1 >= self.max_steps or self.sigterm_flag

    @property
    def epochs(self) -> Iterator[int]:
        for epoch in range(self.epoch, self.num_epochs):
            if self.step >= self.max_steps or self.sigterm_flag:
                return
            yield epoch


class Logger:
    """Stands for the JSONL logger."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, sample: MetricsSample) -> None:
        self.lines.append({"step": sample.step, **sample.metrics})

    def close(self) -> None:
        return


def config(model: Any, batches: Any, **given: Any) -> SimpleNamespace:
    """What this toy's ``setup`` builds from."""
    defaults: dict[str, Any] = {
        "max_steps": 10,
        "num_epochs": 1,
        "grad_acc_steps": 1,
        "val_every_steps": 0,
        "ckpt_every_steps": 0,
        "start_step": 0,
        "optimizer": None,
        "validation": {},
        "checkpoint_dir": "",
        "max_grad_norm": None,
        "zero_grad": True,
        "is_main": True,
    }
    return SimpleNamespace(model=model, batches=batches, **{**defaults, **given})


class TrainFinetuneRecipeForNextTokenPrediction:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def setup(self) -> None:
        cfg = self.cfg
        self.dist_env = SimpleNamespace(is_main=cfg.is_main, rank=0, world_size=1)
        self.model_parts = [cfg.model]
        self.optimizer = [cfg.optimizer or torch.optim.SGD(cfg.model.parameters(), lr=0.01)]
        self.lr_scheduler: list[Any] = []
        self.step_scheduler = StepScheduler(cfg.batches, cfg)
        self.val_dataloaders = dict(cfg.validation)
        self.metric_logger_train = Logger()
        self.metric_logger_valid = {name: Logger() for name in self.val_dataloaders}
        self.domain_mixture = None
        self.best_metric_key = "default"
        self.max_grad_norm = cfg.max_grad_norm
        checkpointing = SimpleNamespace(enabled=bool(cfg.checkpoint_dir), checkpoint_dir=cfg.checkpoint_dir)
        self.checkpointer = SimpleNamespace(config=checkpointing)
        self.load_checkpoint(None)

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        return

    def run_train_validation_loop(self) -> None:
        for mp in self.model_parts:
            mp.train()
        for epoch in self.step_scheduler.epochs:
            self.step_scheduler.set_epoch(epoch)
            for batches in self.step_scheduler:
                train_log_data = self._run_train_optim_step(batches, self.max_grad_norm)
                self.log_train_metrics(train_log_data)
                val_losses = {}
                if self.step_scheduler.is_val_step:
                    for val_name, val_dataloader in self.val_dataloaders.items():
                        val_log_data = self._run_validation_epoch(val_dataloader)
                        val_losses[val_name] = val_log_data.metrics["val_loss"]
                        self.log_val_metrics(val_name, val_log_data, self.metric_logger_valid[val_name])
                    for mp in self.model_parts:
                        mp.train()
                if self.step_scheduler.is_ckpt_step:
                    self.save_checkpoint(
                        epoch,
                        self.step_scheduler.step,
                        train_log_data.metrics["loss"],
                        val_losses,
                        best_metric_key=self.best_metric_key,
                    )
        self.metric_logger_train.close()

    def _run_train_optim_step(self, batches: list[Any], max_grad_norm: float | None = None) -> MetricsSample:
        losses = []
        for batch in batches:
            loss = self.model_parts[0](**batch)["loss"] / len(batches)
            losses.append(loss.detach())
            loss.backward()
        parameters = list(self.model_parts[0].parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or float("inf"))
        for optimizer in self.optimizer:
            optimizer.step()
            if self.cfg.zero_grad:
                optimizer.zero_grad()
        metrics = {
            "loss": torch.stack(losses).sum().item(),
            "grad_norm": norm.item(),
            "lr": self.optimizer[0].param_groups[0]["lr"],
            "mem": 0.0,
            "tps": 100.0,
            "num_tokens_per_step": 32,
            "num_label_tokens": 32,
        }
        return MetricsSample(self.step_scheduler.step, self.step_scheduler.epoch, metrics)

    @torch.no_grad()
    def _run_validation_epoch(self, val_dataloader: Any) -> MetricsSample:
        for mp in self.model_parts:
            mp.eval()
        losses = [self.model_parts[0](**batch)["loss"] for batch in val_dataloader]
        metrics = {"val_loss": torch.stack(losses).mean().item(), "lr": 0.0, "num_label_tokens": 32, "mem": 0.0}
        return MetricsSample(self.step_scheduler.step, self.step_scheduler.epoch, metrics)

    def log_val_metrics(self, val_name: str, log_data: MetricsSample, metric_logger: Any = None) -> None:
        if self.dist_env.is_main and metric_logger is not None:
            metric_logger.log(log_data)

    def log_train_metrics(self, log_data: MetricsSample) -> None:
        if self.dist_env.is_main:
            self.metric_logger_train.log(log_data)

    def save_checkpoint(
        self, epoch: int, step: int, train_loss: Any, val_loss: Any = None, best_metric_key: str = "default"
    ) -> None:
        if not self.checkpointer.config.enabled:
            return
        path = Path(os.path.join(self.checkpointer.config.checkpoint_dir, f"epoch_{epoch}_step_{step}"))
        path.mkdir(parents=True)
        torch.save(self.model_parts[0].state_dict(), path / "model.pt")
