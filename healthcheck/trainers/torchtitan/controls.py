"""What actions may do to torchtitan, and what its Trainer says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.errors import UsageError
from healthcheck.events import EventKind
from healthcheck.protocols import Capabilities
from healthcheck.trainers.adapting import NativeControls, listed
from healthcheck.trainers.controls import TorchControls

if TYPE_CHECKING:
    from healthcheck.trainers.torchtitan.mixin import TrainerWatch

_NO_EPOCHS = "torchtitan counts steps, it has no epochs"
_NO_TESTS = "torchtitan validates, it has no test"

CAPABILITIES = Capabilities(
    trainer="torchtitan",
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
        "eval_step": "torchtitan does not announce the batches of a validation",
        "checkpoint_path": "torchtitan writes checkpoints under checkpoint.folder; it takes no other path",
    },
)


class TorchTitanControls(NativeControls):
    """Ends the loop through ``should_continue_training`` and saves through ``checkpointer.save``."""

    def __init__(self, base: TorchControls, owner: TrainerWatch) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def end_loop(self, reason: str) -> None:
        """The mixin's ``should_continue_training`` asks."""

    def save(self, path: Path | None) -> str:
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        return self._owner.save_after_step()

    def schedulers(self) -> Iterable[Any]:
        container = getattr(self._owner.trainer, "lr_schedulers", None)
        return listed(getattr(container, "schedulers", None))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        logger = getattr(getattr(self._owner.trainer, "metrics_processor", None), "logger", None)
        if logger is not None:
            logger.log(self._owner.named(metrics), step)


def inner_optimizers(container: Any) -> list[Any]:
    """The optimizers that do the work. The container is a torch optimizer too, whose step calls theirs."""
    try:
        return list(container)
    except TypeError:
        return listed(container)


def data_ranks(trainer: Any) -> int:
    """Over how many ranks the tokens of a batch are spread."""
    dims = getattr(trainer, "parallel_dims", None)
    ranks = 1
    for name in ("dp_replicate", "dp_shard", "cp"):
        degree = getattr(dims, name, 1)
        ranks *= degree if isinstance(degree, int) and degree > 0 else 1
    return ranks
