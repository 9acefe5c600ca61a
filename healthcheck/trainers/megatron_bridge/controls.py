"""What actions may do to Megatron Bridge: through its configuration, which its loop reads at each iteration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.events import EventKind
from healthcheck.protocols import Capabilities
from healthcheck.trainers.adapting import NativeControls, scale_schedules
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.megatron_bridge.state import checkpoint_folder, part_of, steps_done

if TYPE_CHECKING:
    from healthcheck.trainers.megatron_bridge.callback import HealthCheckCallback

_AFTER = "Megatron Bridge's callbacks run after the update"
_UNSEEN = f"it needs a look just before or after an update; {_AFTER}"
_NO_BATCH = "Megatron Bridge's callbacks are not given the batch"
_NO_EPOCHS = "Megatron Bridge counts iterations, it has no epochs"

_NOT_MEASURED = (
    *("params.no_gradient", "params.not_in_optimizer", "params.optimizer_orphans", "params.unmoved"),
    *("update_ratio", "updates.lost", "lr.jump", "optimizer.replaced", "grads.leftover"),
)

CAPABILITIES = Capabilities(
    trainer="megatron_bridge",
    events=frozenset(EventKind)
    - {
        EventKind.EPOCH_START,
        EventKind.EPOCH_END,
        EventKind.BATCH_READY,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
    },
    controls=frozenset({"stop", "checkpoint", "scale_lr", "log"}),
    gaps={
        "epoch_start": _NO_EPOCHS,
        "epoch_end": _NO_EPOCHS,
        "batch_ready": _NO_BATCH,
        **dict.fromkeys(_NOT_MEASURED, _UNSEEN),
        **dict.fromkeys(("batch.targets", "batch.nonfinite", "batch.hash_repeat", "time.data"), _NO_BATCH),
        "loss_before_update": _AFTER,
        "before_update": _AFTER,
        "after_update": _AFTER,
        "skip_update": f"{_AFTER}; HealthCheckCallback.skip_iteration leaves out a coming one",
        "checkpoint_path": "Megatron Bridge writes checkpoints under checkpoint.save; it takes no other path",
    },
)

_ABSENT = object()


class MegatronControls(NativeControls):
    """Ends the loop by ``train_iters`` and saves by ``save_interval``; both are given back afterwards."""

    def __init__(self, base: TorchControls, owner: HealthCheckCallback) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner
        self._changed: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def end_loop(self, reason: str) -> None:
        """The loop ends when the iteration under way (or the last one) is counted.

        It then saves a last checkpoint, if it saves any, and ends as if it had been planned so.
        """
        state = self._owner.state
        if state is not None:
            last = max(self._owner.last_iteration, steps_done(state))
            self._set(state.cfg.train, "train_iters", min(last, int(state.cfg.train.train_iters)))

    def save(self, path: Path | None) -> str:
        state, session = self._owner.state, self._owner.watch.session
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        if state is None or session is None:
            raise UsageError("training has not begun")
        root = part_of(state, "checkpoint", "save")
        if not root:
            raise UsageError("checkpoint.save is not set, so Megatron Bridge saves nothing")
        self._set(state.cfg.checkpoint, "save_interval", 1)
        counted = steps_done(state)
        return checkpoint_folder(root, max(self._owner.last_iteration, counted))

    def scale_lr(self, factor: float) -> list[float]:
        optimizer, scheduler = self._owner.optimizer, self._owner.scheduler
        rates = []
        for group in getattr(optimizer, "param_groups", None) or ():
            group["lr"] = group["lr"] * factor
            rates.append(float(group["lr"]))
        scale_schedules([scheduler] if scheduler is not None else [], factor)
        return rates

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        state = self._owner.state
        board = getattr(state, "tensorboard_logger", None)
        if board is not None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)
        wandb = getattr(state, "wandb_logger", None)
        if wandb is not None:
            wandb.log(dict(metrics), step)

    def _set(self, section: Any, name: str, value: Any) -> None:
        before = getattr(section, name, _ABSENT)
        self._changed.setdefault((id(section), name), (section, name, before))
        setattr(section, name, value)

    def give_back(self, *names: str) -> None:
        """Undo what was changed in the configuration."""
        for key, (section, name, before) in list(self._changed.items()):
            if name in names:
                del self._changed[key]
                if before is _ABSENT:
                    delattr(section, name)
                else:
                    setattr(section, name, before)
