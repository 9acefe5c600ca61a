"""Megatron Bridge's training loop on a toy, with its callback interface.

Copied: the order of calls and events in ``train``, ``evaluate`` and ``pretrain`` of version 0.6.2
(``megatron/bridge/training/{train,eval,pretrain}.py``), and how ``CallbackManager`` registers and
fires. Version 0.3.1 lacks ``on_checkpoint_save`` and ``on_data_init_start``: ``version="0.3.1"``.
Replaced: everything that computes. ``forward_step(batch, model)`` returns the loss.
``test_megatron_bridge.py`` compares the order with the real files, and runs this loop with the real
``callbacks.py``, where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable as Function
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VALID_EVENTS = frozenset(
    {"on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"}
    | {f"on_{phase}_{point}" for phase in ("eval", "test") for point in ("start", "step_start", "step_end", "end")}
    | {"on_checkpoint_save"}
)


@dataclass
class CallbackContext:
    state: Any
    model: list[Any]
    user_state: dict[str, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Any] | None = None


class Callback:
    """Base of class-based callbacks: every event is a method that does nothing."""


def _nothing(self: Any, context: CallbackContext) -> None:
    return


for _event in VALID_EVENTS:
    setattr(Callback, _event, _nothing)


class CallbackManager:
    """Registers methods that a callback overrides, and functions; fires both in that order."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Function[[Any], None]]] = {event: [] for event in VALID_EVENTS}
        self.user_state: dict[str, Any] = {}

    def add(self, callback: Any) -> None:
        for one in callback if isinstance(callback, list) else [callback]:
            for event in VALID_EVENTS:
                method = getattr(one, event, None)
                if method is not None and method.__func__ is not getattr(Callback, event):
                    self._callbacks[event].append(method)

    def register(self, event_name: str, fn: Function[[Any], None]) -> None:
        self.list_callbacks(event_name)
        self._callbacks[event_name].append(fn)

    @property
    def events(self) -> frozenset[str]:
        return VALID_EVENTS

    def list_callbacks(self, event_name: str) -> list[Function[[Any], None]]:
        if event_name not in VALID_EVENTS:
            raise ValueError(f"Unknown event '{event_name}'")
        return list(self._callbacks[event_name])

    def has_callbacks(self, event_name: str) -> bool:
        return bool(self._callbacks[event_name])

    def fire(self, event_name: str, context: CallbackContext) -> None:
        for function in self._callbacks[event_name]:
            function(context)


class MegatronOptimizer:
    """Gradients move to ``main_grad``, are clipped there, and leave nothing on ``.grad``."""

    def __init__(self, inner: Any, clip_grad: float = 0.0, scaler: Any = None) -> None:
        self.optimizer, self.clip_grad, self.scaler = inner, clip_grad, scaler

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(self.optimizer.param_groups)

    def step(self) -> tuple[bool, float | None, None]:
        owned = [p for group in self.param_groups for p in group["params"]]
        for parameter in owned:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                before = getattr(parameter, "main_grad", None)
                parameter.main_grad = gradient if before is None else before + gradient
                parameter.grad = None
        held = [p for p in owned if getattr(p, "main_grad", None) is not None]
        if self.scaler is not None:
            for parameter in held:
                parameter.main_grad /= self.scaler
            if any(not bool(p.main_grad.isfinite().all()) for p in held):
                return False, None, None
        norm = torch.nn.utils.get_total_norm([p.main_grad for p in held]).item()
        if self.clip_grad > 0 and norm > self.clip_grad:
            for parameter in held:
                parameter.main_grad *= self.clip_grad / (norm + 1e-6)
        for parameter in held:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        self.optimizer.step()
        for parameter in held:
            parameter.grad = None
        return True, norm, None


def zero_grad_buffer(model: list[Any]) -> None:
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad = None


def config(**sections: dict[str, Any]) -> SimpleNamespace:
    """A ``ConfigContainer`` with the values that the loop and callbacks look at."""
    defaults: dict[str, dict[str, Any]] = {
        "train": {"train_iters": 10, "global_batch_size": 4, "iterations_to_skip": [], "exit_interval": None},
        "model": {"seq_length": 8, "chunks": None},
        "optimizer": {"lr": 0.01, "clip_grad": 0.0, "scaler": None, "zero_grad": True},
        "dataset": {"batches": None, "valid": ()},
        "validation": {"eval_interval": 0, "timelimit": False, "final": True},
        "checkpoint": {"save": None, "load": None, "save_interval": None},
        "logger": {"log_interval": 0},
        "dist": {"pp_last_stage": True},
        "rerun": {"exit_at": None},
    }
    for name, given in sections.items():
        defaults[name].update(given)
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in defaults.items()})


class Board:
    """Stands for TensorBoard's ``SummaryWriter``."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def pretrain(
    config: Any, forward_step: Function[..., Any], callbacks: Any = None, *, api: Any = None, version: str = "0.6.2"
) -> Any:
    """Train, then evaluate and test once more; returns the ``GlobalState``.

    :param api: module with ``CallbackManager`` and ``CallbackContext``; this one by default.
    """
    api = api or sys.modules[__name__]
    manager = callbacks if isinstance(callbacks, api.CallbackManager) else api.CallbackManager()
    if manager is not callbacks:
        manager.add(list(callbacks or []))
    model = config.model.chunks
    inner = torch.optim.SGD([p for chunk in model for p in chunk.parameters()], lr=config.optimizer.lr)
    optimizer = MegatronOptimizer(inner, config.optimizer.clip_grad, config.optimizer.scaler)
    progress = SimpleNamespace(
        step=getattr(config, "start_step", 0),
        do_valid=bool(config.dataset.valid),
        do_test=bool(config.dataset.valid),
    )
    state = SimpleNamespace(cfg=config, train_state=progress, tensorboard_logger=Board(), wandb_logger=None)
    loop = Loop(api, manager, version, state, model, optimizer, forward_step)
    final = config.validation.final
    loop.train(iter(config.dataset.batches))
    loop.evaluate_and_print_results(is_test=False, wanted=progress.do_valid and final)
    loop.evaluate_and_print_results(is_test=True, wanted=progress.do_test and final)
    return state


class Loop:
    def __init__(
        self, api: Any, manager: Any, version: str, state: Any, model: list[Any], optimizer: Any, forward_step: Any
    ) -> None:
        self.api, self.manager, self.version = api, manager, version
        self.state, self.model, self.optimizer, self.forward_step = state, model, optimizer, forward_step
        self.scheduler = SimpleNamespace(optimizer=optimizer, max_lr=optimizer.param_groups[0]["lr"], min_lr=0.0)

    def fire(self, event: str, *, training: bool = True, **facts: Any) -> None:
        if self.manager.has_callbacks(event):
            if training:
                facts |= {"optimizer": self.optimizer, "scheduler": self.scheduler}
            given = {"state": self.state, "model": self.model, "user_state": self.manager.user_state, **facts}
            self.manager.fire(event, self.api.CallbackContext(**given))

    def train(self, data: Iterator[Any]) -> None:
        cfg, train_state = self.state.cfg, self.state.train_state
        self.fire("on_train_start")
        should_exit = False
        while train_state.step < cfg.train.train_iters:
            if self._should_skip_and_handle_iteration(data):
                continue
            self.fire("on_train_step_start")
            loss_dict, skipped_iter, should_checkpoint, should_exit, grad_norm = self.wrapped_train_step(next(data))
            self.fire("on_train_step_end", loss_dict=loss_dict, grad_norm=grad_norm, skipped_iter=bool(skipped_iter))
            if should_checkpoint:
                self.save_checkpoint_and_time()
            if should_exit:
                break
            train_state.step += 1
            interval = cfg.validation.eval_interval
            if train_state.do_valid and interval and train_state.step % interval == 0:
                self.evaluate_and_print_results(is_test=False, wanted=True)
            should_exit = self.checkpoint_and_decide_exit()
            if should_exit:
                break
        every = cfg.checkpoint.save_interval
        if not should_exit and cfg.checkpoint.save and train_state.step and every and train_state.step % every != 0:
            self.save_checkpoint_and_time()
        if should_exit:
            sys.exit(0)
        self.fire("on_train_end")

    def wrapped_train_step(self, batch: Any) -> tuple[dict[str, Any], int, bool, bool, float | None]:
        cfg = self.state.cfg
        if cfg.optimizer.zero_grad:
            zero_grad_buffer(self.model)
        loss = self.forward_step(batch, self.model)
        (loss if cfg.optimizer.scaler is None else loss * cfg.optimizer.scaler).backward()
        if cfg.rerun.exit_at == self.state.train_state.step + 1:
            return {}, 1, True, True, None
        successful, grad_norm, _ = self.optimizer.step()
        losses = {"lm loss": loss.detach()} if cfg.dist.pp_last_stage else {}
        return losses, int(not successful), False, False, grad_norm

    def _should_skip_and_handle_iteration(self, data: Iterator[Any]) -> bool:
        if self.state.train_state.step + 1 not in self.state.cfg.train.iterations_to_skip:
            return False
        next(data)
        self.state.train_state.step += 1
        return True

    def checkpoint_and_decide_exit(self) -> bool:
        checkpoint, step = self.state.cfg.checkpoint, self.state.train_state.step
        if checkpoint.save and checkpoint.save_interval and step % checkpoint.save_interval == 0:
            self.save_checkpoint_and_time()
        interval = self.state.cfg.train.exit_interval
        return bool(interval) and step % interval == 0

    def save_checkpoint_and_time(self) -> None:
        if self.state.cfg.checkpoint.save is None:  # the rerun state machine asks without looking
            return
        folder = Path(self.state.cfg.checkpoint.save) / f"iter_{self.state.train_state.step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": [chunk.state_dict() for chunk in self.model]}, folder / "model.pt")
        if self.version != "0.3.1":
            self.fire("on_checkpoint_save")

    def evaluate_and_print_results(self, *, is_test: bool, wanted: bool) -> None:
        if not wanted:
            return
        phase = "test" if is_test else "eval"
        start_event, end_event = f"on_{phase}_start", f"on_{phase}_end"
        step_start_event, step_end_event = f"on_{phase}_step_start", f"on_{phase}_step_end"
        losses: list[Any] = []
        for chunk in self.model:
            chunk.eval()
        self.fire(start_event, training=False)
        with torch.no_grad():
            for batch in self.state.cfg.dataset.valid:
                self.fire(step_start_event, training=False)
                losses.append(self.forward_step(batch, self.model))
                self.fire(step_end_event, training=False)
        if not self.state.cfg.validation.timelimit:
            self.fire(end_event, training=False, total_loss_dict=_mean(losses))
        for chunk in self.model:
            chunk.train()


def _mean(losses: Iterable[Any]) -> dict[str, Any]:
    return {"lm loss": torch.stack(list(losses)).mean()}
