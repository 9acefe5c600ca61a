"""The class that a Dream Trainer callback derives from: the package's own where it can be imported.

Version 0.3.0 needs modules that are published nowhere, so that many an environment has its own copy
of the trainer. Its ``CallbackCollection`` asks no base class: it looks at ``__qualname__`` of each
method and calls those that do not belong to a class called ``Callback``.
"""

from __future__ import annotations

import importlib
from typing import Any

HOOKS = (
    "pre_launch",
    "pre_configure",
    "post_configure",
    "pre_setup",
    "post_setup",
    "post_load_state_dict",
    "pre_fit",
    "post_fit",
    "pre_epoch",
    "post_epoch",
    "pre_train_epoch",
    "post_train_epoch",
    "pre_train_step",
    "post_train_step",
    "pre_optimizer_step",
    "post_optimizer_step",
    "pre_optimizer_zero_grad",
    "post_optimizer_zero_grad",
    "pre_validation_epoch",
    "post_validation_epoch",
    "pre_validation_step",
    "post_validation_step",
    "on_interrupt",
    "train_context",
    "validation_context",
)
"""Hooks of version 0.3.0."""


class Callback:
    """Stands in for ``dream_trainer.callbacks.Callback``: every hook is there, none is overridden."""

    _dependency: Any = object
    """What the trainer must be an instance of."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return

    def pop_self(self) -> None:
        """Take this callback out of its trainer's collection."""
        trainer: Any = self.trainer  # type: ignore[attr-defined]
        trainer.callbacks.pop(type(self).__name__)


def _unused(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is not overridden and must not be called")

    hook.__name__, hook.__qualname__ = name, f"Callback.{name}"
    return hook


for _name in HOOKS:
    setattr(Callback, _name, _unused(_name))


def callback_class() -> Any:
    """The package's ``Callback`` if it imports here, else :class:`Callback`."""
    try:
        return importlib.import_module("dream_trainer.callbacks").Callback
    except ImportError:
        return Callback
