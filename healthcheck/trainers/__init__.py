"""Trainer adapters: each translates one framework's callbacks into events and gives Controls.

Importing this package imports no framework; a framework's module here does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from healthcheck.extend.hookspecs import hookimpl
from healthcheck.instrument.libraries import Place
from healthcheck.trainers.libraries import LIBRARIES


@dataclass(frozen=True, slots=True)
class _Target:
    """What an adapter attaches to: an object of one of these classes, or one with all of these methods."""

    takes: str
    classes: tuple[tuple[str, str], ...] = ()
    """As (module, name)."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Alternatives; for packages that many a user has an own copy of, or subclasses under other names."""
    makers: tuple[tuple[str, str, str], ...] = ()
    """How a script comes by such an object: see :class:`healthcheck.instrument.companions.Companions`."""
    mixin: str = ""
    """Name of a class in the adapter's module: its objects are watched already."""
    not_inside: str = ""
    """Module that makes such objects for itself; its own adapter is enough then."""

    def fits(self, target: Any) -> bool:
        kind = type(target)
        if any((cls.__module__, cls.__name__) in self.classes for cls in kind.__mro__):
            return True
        return any(all(hasattr(kind, name) for name in names) for names in self.methods)


_ADAPTERS = {
    "huggingface": _Target(
        "a Trainer of transformers or TRL",
        (("transformers.trainer", "Trainer"),),
        makers=(("transformers.trainer", "Trainer", ""),),
    ),
    "lightning": _Target(
        "a Trainer of Lightning",
        (("lightning.pytorch.trainer.trainer", "Trainer"), ("pytorch_lightning.trainer.trainer", "Trainer")),
        makers=(
            ("lightning.pytorch.trainer.trainer", "Trainer", ""),
            ("pytorch_lightning.trainer.trainer", "Trainer", ""),
        ),
    ),
    "accelerate": _Target(
        "an Accelerator",
        (("accelerate.accelerator", "Accelerator"),),
        makers=(("accelerate.accelerator", "Accelerator", ""),),
        not_inside="transformers.trainer",
    ),
    "megatron_bridge": _Target(
        "a CallbackManager of Megatron Bridge",
        methods=(("add", "register", "list_callbacks", "has_callbacks", "fire"),),
        # `pretrain` makes a manager of what it was given, if it was given anything.
        makers=(("megatron.bridge.training.callbacks", "normalize_callbacks", "CallbackManager"),),
    ),
    "automodel": _Target(
        "a recipe of NeMo AutoModel",
        methods=(("run_train_validation_loop", "log_train_metrics", "save_checkpoint"),),
        makers=(("nemo_automodel.recipes.llm.train_ft", "TrainFinetuneRecipeForNextTokenPrediction", ""),),
        mixin="HealthCheckRecipe",
    ),
    "dream": _Target(
        "a trainer or CallbackCollection of Dream Trainer",
        methods=(
            ("fit", "named_models", "named_optimizers", "training_step"),
            ("initialize", "refresh", "append", "values"),
        ),
        makers=(("dream_trainer.trainer.base", "BaseTrainer", ""),),
    ),
    "torchtitan": _Target(
        "a Trainer of torchtitan",
        methods=(("train", "train_step", "should_continue_training"),),
        makers=(("torchtitan.trainer", "Trainer", ""),),
        mixin="HealthCheckTrainer",
    ),
}
"""Adapter's module here -> what it attaches to."""


@hookimpl
def healthcheck_register_trainers(register: Callable[[str, Callable[..., Any]], None]) -> None:
    """The built-in adapters, for ``attach``: each looks at an object's class before it imports anything."""
    for name, target in _ADAPTERS.items():
        register(name, _attach_to(name, target))
    for name, places in LIBRARIES.items():
        register(name, _seen_at(places))


def _seen_at(places: Sequence[Place]) -> Callable[..., Any]:
    """A library that is seen by what its functions do: there is nothing to attach to."""

    def attach(session: Any, target: Any, **options: Any) -> Any:
        return None

    attach.places = places  # type: ignore[attr-defined]
    return attach


def _attach_to(name: str, wanted: _Target) -> Callable[..., Any]:
    """The function that a session is given for one adapter, with what is known without importing it."""

    def attach(session: Any, target: Any, **options: Any) -> Any:
        if isinstance(target, type) or not wanted.fits(target):
            return None
        return importlib.import_module(f"healthcheck.trainers.{name}").attach(target, session, **options)

    def found(session: Any, target: Any) -> Any:
        """A script has made this object; None if it is watched already, or belongs to another one that is."""
        module = importlib.import_module(f"healthcheck.trainers.{name}")
        if wanted.mixin and isinstance(target, getattr(module, wanted.mixin)):
            return None
        if wanted.not_inside and _on_stack(wanted.not_inside):
            return None
        return module.attach(target, session)

    attach.takes = wanted.takes  # type: ignore[attr-defined]
    attach.makers = wanted.makers  # type: ignore[attr-defined]
    attach.found = found  # type: ignore[attr-defined]
    return attach


def _on_stack(module: str) -> bool:
    """Whether a function of a module is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
