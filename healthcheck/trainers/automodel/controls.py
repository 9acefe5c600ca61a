"""What actions may do to an AutoModel recipe: through its step scheduler and its own checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.events import EventKind
from healthcheck.protocols import Capabilities
from healthcheck.trainers.adapting import NativeControls, listed, scale_schedules
from healthcheck.trainers.controls import TorchControls

if TYPE_CHECKING:
    from healthcheck.trainers.automodel.callback import HealthCheckCallback

_NO_EPOCHS = "recipes announce no epochs; every event carries its epoch"
_NO_TESTS = "recipes validate, they have no test"

CAPABILITIES = Capabilities(
    trainer="automodel",
    events=frozenset(EventKind)
    - {
        EventKind.EPOCH_START,
        EventKind.EPOCH_END,
        EventKind.EVAL_STEP,
        EventKind.TEST_START,
        EventKind.TEST_STEP,
        EventKind.TEST_END,
    },
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps={
        **dict.fromkeys(("epoch_start", "epoch_end"), _NO_EPOCHS),
        **dict.fromkeys(("test_start", "test_step", "test_end"), _NO_TESTS),
        "eval_step": "recipes do not announce the batches of a validation",
        "checkpoint_path": "recipes write checkpoints under checkpoint.checkpoint_dir; they take no other path",
    },
)


class AutoModelControls(NativeControls):
    """Ends the loop as SIGTERM would: no validation, a checkpoint if there are any, then the regular end."""

    def __init__(self, base: TorchControls, owner: HealthCheckCallback, recipe: Any) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner
        self._recipe = recipe
        self._save_wanted = False
        self._waiting: dict[str, float] = {}

    def end_loop(self, reason: str) -> None:
        self._recipe.step_scheduler.sigterm_flag = True
        session = self._owner.session
        if session is not None:
            session.note("the recipe ends as after SIGTERM: it saves a checkpoint, and MLflow marks its run KILLED")

    def save(self, path: Path | None) -> str:
        config = self._recipe.checkpointer.config
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        if not getattr(config, "enabled", True):
            raise UsageError("checkpoint.enabled is off, so the recipe saves nothing")
        self._save_wanted = True
        scheduler = self._recipe.step_scheduler
        return os.path.join(str(config.checkpoint_dir), f"epoch_{scheduler.epoch}_step_{scheduler.step}")

    def heed(self) -> None:
        """A step's results are there: save now if that was asked for and the recipe will not do so itself."""
        sample, scheduler = self._owner.sample, self._recipe.step_scheduler
        if not self._save_wanted or sample is None:
            return
        self._save_wanted = False
        if getattr(scheduler, "is_ckpt_step", False):
            return
        key = getattr(self._recipe, "best_metric_key", "default")
        loss = sample.metrics.get("loss")
        self._recipe.save_checkpoint(scheduler.epoch, scheduler.step, loss, {}, best_metric_key=key)

    def scale_lr(self, factor: float) -> list[float]:
        rates = super().scale_lr(factor)
        scale_schedules(listed(getattr(self._recipe, "lr_scheduler", None)), factor)
        return rates

    def schedulers(self) -> Iterable[Any]:
        return listed(getattr(self._recipe, "lr_scheduler", None))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """With the metrics of the next step, which is when the recipe logs."""
        self._waiting.update(metrics)

    def take_waiting(self) -> dict[str, float]:
        waiting, self._waiting = self._waiting, {}
        return waiting
