"""torchtitan's ``Trainer`` loop on a toy.

Copied from version 0.3.0: the order of calls in ``train`` and ``train_step`` (``torchtitan/trainer.py``),
what it raises about, when it logs, and when ``CheckpointManager.save`` saves. Replaced: everything that
computes, and ``__init__``. ``test_torchtitan.py`` compares the order with the real file where it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class DataloaderExhaustedError(Exception):
    pass


class OptimizersContainer(torch.optim.Optimizer):
    """A torch optimizer whose step calls those of others, as torchtitan's is."""

    def __init__(self, optimizers: list[Any], zero_grad: bool) -> None:
        self.optimizers, self._clears = optimizers, zero_grad
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers if self._clears else ():
            optimizer.zero_grad(set_to_none)


class MetricsProcessor:
    def __init__(self, log_freq: int) -> None:
        self.log_freq = log_freq
        self.lines: list[dict[str, Any]] = []
        self.logger = SimpleNamespace(log=lambda metrics, step: self.lines.append({"step": step, **metrics}))

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.log_freq == 0

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        self.logger.log({"loss": global_avg_loss, "grad_norm": grad_norm, **(extra_metrics or {})}, step)

    def log_validation(self, loss: float, step: int) -> None:
        self.logger.log({"validation_loss": loss}, step)


class Checkpointer:
    def __init__(self, folder: str, interval: int, model: Any) -> None:
        self.enable, self.interval, self.folder, self.model = bool(folder), interval, folder, model

    def load(self, step: int = -1) -> None:
        return

    def maybe_wait_for_staging(self) -> None:
        return

    def _create_checkpoint_id(self, step: int) -> str:
        return str(Path(self.folder) / f"step-{step}")

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and (last_step or curr_step % self.interval == 0)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        folder = Path(self._create_checkpoint_id(curr_step))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "model.pt")
        return True


class Validator:
    def __init__(self, batches: Any, freq: int, metrics_processor: MetricsProcessor) -> None:
        self.batches, self.freq, self.metrics_processor = batches, freq, metrics_processor

    def should_validate(self, step: int) -> bool:
        return step % self.freq == 0

    @torch.no_grad()
    def validate(self, model_parts: list[Any], step: int) -> None:
        model_parts[0].eval()
        losses = [model_parts[0](**batch)["loss"] for batch in self.batches]
        self.metrics_processor.log_validation(loss=torch.stack(losses).mean().item(), step=step)
        model_parts[0].train()


class Trainer:
    def __init__(
        self,
        model: Any,
        batches: Any,
        *,
        optimizers: list[Any] | None = None,
        steps: int = 10,
        accumulate: int = 1,
        max_norm: float = float("inf"),
        log_freq: int = 1,
        folder: str = "",
        interval: int = 500,
        validation: Any = (),
        validate_every: int = 5,
        zero_grad: bool = True,
    ) -> None:
        self.config = SimpleNamespace(
            training=SimpleNamespace(steps=steps, max_norm=max_norm),
            checkpoint=SimpleNamespace(load_step=-1),
            validator=SimpleNamespace(enable=bool(validation)),
        )
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, cp=1)
        self.model_parts = [model]
        self.optimizers = OptimizersContainer(
            optimizers or [torch.optim.SGD(model.parameters(), lr=0.01)], zero_grad=zero_grad
        )
        self.lr_schedulers = SimpleNamespace(schedulers=[], step=lambda: None, get_metrics=dict)
        self.metrics_processor = MetricsProcessor(log_freq)
        self.checkpointer = Checkpointer(folder, interval, model)
        self.validator = Validator(validation, validate_every, self.metrics_processor)
        self.dataloader, self.gradient_accumulation_steps = batches, accumulate
        self.step = self.ntokens_seen = 0

    def batch_generator(self, data: Any) -> Iterator[Any]:
        yield from data
        raise DataloaderExhaustedError

    def train(self) -> None:
        config = self.config
        self.checkpointer.load(step=config.checkpoint.load_step)
        data_iterator = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            try:
                self.train_step(data_iterator)
            except DataloaderExhaustedError:
                break
            self.checkpointer.save(self.step, last_step=(self.step == config.training.steps))
            if self.config.validator.enable and self.validator.should_validate(self.step):
                self.validator.validate(self.model_parts, self.step)

    def train_step(self, data_iterator: Any) -> None:
        self.optimizers.zero_grad()
        lr_metrics = self.lr_schedulers.get_metrics()
        should_log = self.metrics_processor.should_log(self.step)
        losses = []
        for _ in range(self.gradient_accumulation_steps):
            batch = next(data_iterator)
            loss = self.forward_backward_step(batch)
            losses.append(loss.detach())
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), self.config.training.max_norm)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if not should_log:
            return
        global_avg_loss = float(torch.stack(losses).sum())
        if not math.isfinite(global_avg_loss):
            raise RuntimeError(f"Loss is not finite (global_avg_loss={global_avg_loss}) at step {self.step}.")
        self.metrics_processor.log(
            self.step, global_avg_loss, global_avg_loss, float(grad_norm.item()), extra_metrics=lr_metrics
        )

    def forward_backward_step(self, batch: Any) -> Any:
        loss = self.model_parts[0](**batch)["loss"] / self.gradient_accumulation_steps
        loss.backward()
        return loss

    def should_continue_training(self) -> bool:
        return self.step < self.config.training.steps
