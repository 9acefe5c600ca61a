"""Dream Trainer's loop on a toy, with its callback interface.

Copied from version 0.3.0: the order of calls in ``fit``, ``_fit``, ``perform_training_epoch``,
``perform_validation_epoch`` and ``step`` (``dream_trainer/trainer/base.py``), what ``step`` raises
about, and how ``CallbackCollection`` finds overridden methods (``callbacks/callback.py``). Replaced:
the distributed world, setup, data loading. ``test_dream.py`` compares the order with the real file
where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch

HOOKS = (
    *("pre_launch", "pre_configure", "post_configure", "pre_setup", "post_setup", "post_load_state_dict"),
    *("pre_fit", "post_fit", "pre_epoch", "post_epoch", "pre_train_epoch", "post_train_epoch"),
    *("pre_train_step", "post_train_step", "pre_optimizer_step", "post_optimizer_step"),
    *("pre_optimizer_zero_grad", "post_optimizer_zero_grad", "pre_validation_epoch", "post_validation_epoch"),
    *("pre_validation_step", "post_validation_step", "on_interrupt", "train_context", "validation_context"),
)


class Callback:
    trainer: Any
    _dependency: Any = object

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


def _never(name: str) -> Any:
    def hook(self: Any, *args: Any) -> None:
        raise NotImplementedError("This function should never be called")

    hook.__qualname__ = f"Callback.{name}"
    return hook


for _name in HOOKS:
    setattr(Callback, _name, _never(_name))


class CallbackCollection(dict[str, Any]):
    """Callbacks by class name; only what a callback overrides is called."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        super().__init__((type(callback).__name__, callback) for callback in callbacks)
        self.refresh()

    def refresh(self) -> None:
        self.triggers = {
            name: [c for c in self.values() if not getattr(c, name).__qualname__.startswith("Callback.")]
            for name in HOOKS
        }

    def append(self, callback: Any) -> None:
        self[type(callback).__name__] = callback
        self.refresh()
        if hasattr(self, "trainer"):
            self.initialize(self.trainer)

    def initialize(self, trainer: Any) -> None:
        self.trainer = trainer
        for callback in self.values():
            assert isinstance(trainer, callback._dependency)
            callback.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self[name].load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)

        def call(*args: Any) -> list[Any]:
            found = [getattr(callback, name)(*args) for callback in self.triggers[name]]
            return [output for output in found if output is not None]

        return call


class Trainer:
    """A user's trainer: ``training_step`` is theirs, the loop is the package's.

    :param result: what ``training_step`` returns besides the loss.
    """

    def __init__(
        self,
        model: Any,
        train: Any,
        callbacks: CallbackCollection,
        *,
        optimizer: Any = None,
        validation: Any = (),
        n_epochs: int | None = 1,
        accumulate: int = 1,
        val_every_n_steps: int | None = None,
        clip: float | None = None,
        zero_grad: bool = True,
        uses_own_step: bool = True,
    ) -> None:
        self.model, self.train_dataloader, self.val_dataloader = model, train, validation
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        self.callbacks = callbacks
        self.training_parameters = SimpleNamespace(
            n_epochs=n_epochs, val_every_n_steps=val_every_n_steps, gradient_clip_val=clip
        )
        self._num_gradient_accumulation_steps = accumulate
        self._num_train_batches = 0
        self.zero_grad, self.uses_own_step = zero_grad, uses_own_step
        self.global_step = self.current_epoch = self.local_batches = 0
        self.is_sanity_validation = False
        self.logged: list[dict[str, Any]] = []
        callbacks.initialize(self)

    # what mixins of the package give

    def named_models(self) -> dict[str, Any]:
        return {"model": self.model}

    def named_optimizers(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def named_schedulers(self) -> dict[str, Any]:
        return {}

    def log_dict(self, logs: dict[str, Any]) -> None:
        self.logged.append(logs)

    # the user's

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.model(**batch)["loss"]
        self.backward(loss)
        if not self.is_accumulating_gradients:
            if self.uses_own_step:
                return {"loss": loss, "grad_norm": self.step(self.optimizer)}
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model(**batch)["loss"]}

    # the package's

    @property
    def is_accumulating_gradients(self) -> bool:
        return ((self.local_batches + 1) % self._num_gradient_accumulation_steps) != 0

    @property
    def num_gradient_accumulation_steps(self) -> int:
        return self._num_gradient_accumulation_steps

    def backward(self, loss: Any) -> None:
        (loss / self._num_gradient_accumulation_steps).backward()

    def step(self, optimizer: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            raise RuntimeError("Tried to step model with no gradients on any of its parameters")
        self._validate_gradients(parameters)
        total_norm = self.total_gradient_norm(parameters)
        if not torch.isfinite(total_norm):
            raise RuntimeError(f"Gradient norm is non-finite before optimizer step: {total_norm}")
        if float(total_norm) == 0.0:
            raise RuntimeError("All optimizer gradients are exactly zero before optimizer step")
        self.clip_gradient_norm(parameters, total_norm)
        self.callbacks.pre_optimizer_step(self.model, optimizer)
        optimizer.step()
        self.callbacks.post_optimizer_step(self.model, optimizer)
        self.callbacks.pre_optimizer_zero_grad(self.model, optimizer)
        if self.zero_grad:
            optimizer.zero_grad()
        self.callbacks.post_optimizer_zero_grad(self.model, optimizer)
        for scheduler in self.named_schedulers().values():
            scheduler.step()
        return total_norm

    def _validate_gradients(self, parameters: list[Any]) -> None:
        if any(not bool(p.grad.isfinite().all()) for p in parameters):
            raise RuntimeError("Invalid gradients before optimizer step")

    def total_gradient_norm(self, parameters: list[Any]) -> Any:
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])

    def clip_gradient_norm(self, parameters: list[Any], total_norm: Any) -> None:
        if self.training_parameters.gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.training_parameters.gradient_clip_val, total_norm)

    def fit(self) -> None:
        try:
            self._fit()
        except Exception:
            self.callbacks.on_interrupt()
            raise

    def _fit(self) -> None:
        self.callbacks.pre_launch()
        self.callbacks.pre_configure()
        self.callbacks.post_configure()
        self.callbacks.pre_setup()
        self._num_train_batches = len(self.train_dataloader)
        self.callbacks.post_setup()
        self.callbacks.pre_fit()
        self.perform_sanity_validation_steps()
        n_epochs = self.training_parameters.n_epochs
        for _ in range(self.current_epoch, n_epochs) if n_epochs is not None else repeat(0):
            self.callbacks.pre_epoch()
            self.perform_training_epoch()
            self.callbacks.post_epoch()
            self.current_epoch += 1
        self.callbacks.post_fit()

    def perform_sanity_validation_steps(self) -> None:
        if self.global_step == 0:
            self.is_sanity_validation = True
            self.perform_validation_epoch()
            self.is_sanity_validation = False

    def perform_training_epoch(self) -> None:
        if self._num_train_batches <= 0:
            return
        self.model.train()
        self.callbacks.pre_train_epoch()
        batch_idx = 0
        result: dict[str, Any] = {}
        for batch in self.train_dataloader:
            if batch_idx >= self._num_train_batches:
                break
            self.callbacks.pre_train_step(batch, batch_idx)
            self.callbacks.train_context()
            result = self.training_step(batch, batch_idx)
            result = {k: v.detach() for k, v in result.items()}
            self.callbacks.post_train_step(result, batch_idx)
            if not self.is_accumulating_gradients:
                self.global_step += 1
                every = self.training_parameters.val_every_n_steps
                if every is not None and self.global_step % every == 0:
                    self.perform_validation_epoch()
                    self.model.train()
            self.local_batches += 1
            batch_idx += 1
        if batch_idx < self._num_train_batches:
            raise RuntimeError("received fewer training batches than expected")
        if self.training_parameters.val_every_n_steps is None:
            self.perform_validation_epoch()
        self.callbacks.post_train_epoch(result)

    @torch.no_grad()
    def perform_validation_epoch(self) -> None:
        if not len(self.val_dataloader):
            return
        self.model.eval()
        self.callbacks.pre_validation_epoch()
        losses = []
        for batch_idx, batch in enumerate(self.val_dataloader):
            self.callbacks.pre_validation_step(batch, batch_idx)
            self.callbacks.validation_context()
            result = self.validation_step(batch, batch_idx)
            losses.append(result["loss"])
            self.callbacks.post_validation_step(result, batch_idx)
        self.callbacks.post_validation_epoch({"loss": torch.stack(losses).mean()})
