"""What actions may do to the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from healthcheck.core.errors import UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls
from healthcheck.trainers.native import NativeControls

_TESTS = (EventKind.TEST_START, EventKind.TEST_STEP, EventKind.TEST_END)

CAPABILITIES = Capabilities(
    trainer="huggingface",
    events=frozenset(EventKind) - frozenset(_TESTS),
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps={
        "checkpoint_path": "the Trainer writes checkpoints under its output_dir; it takes no other path",
        **dict.fromkeys(
            (kind.value for kind in _TESTS), "predict() is called outside of train(), when the run is over"
        ),
    },
)


class Owner(Protocol):
    """The callback that these controls belong to."""

    control: Any
    lr_scheduler: Any

    @property
    def trainer(self) -> Any: ...
    def save_at_step_end(self) -> str: ...


class HuggingFaceControls(NativeControls):
    """Ends the loop through ``control.should_training_stop`` and saves through ``control.should_save``."""

    def __init__(self, base: TorchControls, owner: Owner) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def end_loop(self, reason: str) -> None:
        control = self._owner.control
        if control is not None:
            control.should_training_stop = True

    def save(self, path: Path | None) -> str:
        if path is not None:
            raise UsageError(CAPABILITIES.gaps["checkpoint_path"] + "; leave the path out")
        return self._owner.save_at_step_end()

    def schedulers(self) -> Iterable[Any]:
        return () if self._owner.lr_scheduler is None else (self._owner.lr_scheduler,)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        trainer = self._owner.trainer
        if trainer is not None:
            trainer.log(dict(metrics))
