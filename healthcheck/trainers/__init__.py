"""Trainer adapters: each translates one framework's callbacks into events and gives Controls.

Importing this package imports no framework; a framework's module here does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from healthcheck.hookspecs import hookimpl


@dataclass(frozen=True, slots=True)
class _Target:
    """What an adapter attaches to: an object of one of these classes, or one with all of these methods."""

    takes: str
    classes: tuple[tuple[str, str], ...] = ()
    """As (module, name)."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Alternatives; for packages that many a user has an own copy of, or subclasses under other names."""

    def fits(self, target: Any) -> bool:
        kind = type(target)
        if any((cls.__module__, cls.__name__) in self.classes for cls in kind.__mro__):
            return True
        return any(all(hasattr(kind, name) for name in names) for names in self.methods)


_ADAPTERS = {
    "huggingface": _Target("a Trainer of transformers or TRL", (("transformers.trainer", "Trainer"),)),
    "lightning": _Target(
        "a Trainer of Lightning",
        (("lightning.pytorch.trainer.trainer", "Trainer"), ("pytorch_lightning.trainer.trainer", "Trainer")),
    ),
    "accelerate": _Target("an Accelerator", (("accelerate.accelerator", "Accelerator"),)),
    "megatron_bridge": _Target(
        "a CallbackManager of Megatron Bridge",
        methods=(("add", "register", "list_callbacks", "has_callbacks", "fire"),),
    ),
    "automodel": _Target(
        "a recipe of NeMo AutoModel", methods=(("run_train_validation_loop", "log_train_metrics", "save_checkpoint"),)
    ),
    "dream": _Target(
        "a trainer or CallbackCollection of Dream Trainer",
        methods=(
            ("fit", "named_models", "named_optimizers", "training_step"),
            ("initialize", "refresh", "append", "values"),
        ),
    ),
    "torchtitan": _Target("a Trainer of torchtitan", methods=(("train", "train_step", "should_continue_training"),)),
}
"""Adapter's module here -> what it attaches to."""


@hookimpl
def healthcheck_register_trainers(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """The built-in adapters, for ``attach``: each looks at an object's class before it imports anything."""
    for name, target in _ADAPTERS.items():
        register(name, _attach_to(name, target))


def _attach_to(name: str, wanted: _Target) -> Callable[..., Any]:
    def attach(session: Any, target: Any, **options: Any) -> Any:
        if isinstance(target, type) or not wanted.fits(target):
            return None
        return importlib.import_module(f"healthcheck.trainers.{name}").attach(target, session, **options)

    attach.takes = wanted.takes  # type: ignore[attr-defined]
    return attach
