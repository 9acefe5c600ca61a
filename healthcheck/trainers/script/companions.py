"""Under ``healthcheck run``, a framework that the script uses gets its native adapter by itself.

Nothing is imported here: a framework's constructor is wrapped once the script has imported it. A
script that adds our callback itself keeps that one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.session import Session

_TOLD = (
    ("torchtitan.trainer", "Trainer", "torchtitan"),
    ("dream_trainer.trainer.base", "BaseTrainer", "dream"),
    ("nemo_automodel.recipes.llm.train_ft", "TrainFinetuneRecipeForNextTokenPrediction", "automodel"),
)
"""Module, the class that is constructed, and our adapter for it."""
_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class Companions:
    """Adds the adapters of one session to trainers as they are built."""

    def __init__(self, session: Session, patches: Patches, imports: AfterImport) -> None:
        self._session = session
        self._patches = patches
        self._imports = imports

    def install(self) -> None:
        when = self._imports.when
        when("transformers.trainer", functools.partial(self._follow, "Trainer", self._huggingface))
        for name in _LIGHTNING:
            when(name, functools.partial(self._follow, "Trainer", self._lightning))
        when("accelerate.accelerator", functools.partial(self._follow, "Accelerator", self._accelerate))
        for module, kind, adapter in _TOLD:
            when(module, functools.partial(self._follow, kind, functools.partial(self._told, adapter)))
        when("megatron.bridge.training.callbacks", self._megatron)

    def _follow(self, kind: str, attach: Callable[[Any], Any], module: ModuleType) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
                original(trainer, *args, **kwargs)
                if self._patches.active:
                    guarded(self._session, attach, trainer)

            return __init__

        self._patches.replace(getattr(module, kind), "__init__", make)

    def _huggingface(self, trainer: Any) -> None:
        from healthcheck.trainers.huggingface.callback import attach

        self._quiet(attach(trainer, self._session))

    def _lightning(self, trainer: Any) -> None:
        from healthcheck.trainers.lightning.callback import attach

        self._quiet(attach(trainer, self._session))

    def _accelerate(self, accelerator: Any) -> None:
        if _inside("transformers.trainer"):  # the Trainer's own; its adapter is the Trainer's
            return
        from healthcheck.trainers.accelerate import attach

        self._quiet(attach(accelerator, self._session))

    def _told(self, adapter: str, trainer: Any) -> None:
        module = importlib.import_module(f"healthcheck.trainers.{adapter}")
        mixin = getattr(module, "HealthCheckTrainer", None) or getattr(module, "HealthCheckRecipe", None)
        if mixin is None or not isinstance(trainer, mixin):
            self._quiet(module.attach(trainer, self._session))

    def _megatron(self, module: ModuleType) -> None:
        """``pretrain`` makes a manager of what it was given, if it was given anything."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def normalize_callbacks(callbacks: Any) -> Any:
                manager = original(callbacks)
                if self._patches.active:
                    manager = module.CallbackManager() if manager is None else manager
                    guarded(self._session, self._told, "megatron_bridge", manager)
                return manager

            return normalize_callbacks

        self._patches.replace(module, "normalize_callbacks", make)

    def _quiet(self, adapter: Any) -> None:
        """An unmodified script prints and logs what it always did, unless ``log_prefix`` asks for ours.

        A callback of the script's own is left as it is.
        """
        if adapter.watch.given is self._session:
            adapter.watch.forwards = bool(self._session.settings.get("log_prefix"))


def _inside(module: str) -> bool:
    """Whether a function of a module is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
