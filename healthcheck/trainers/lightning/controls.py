"""What actions may do to the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import TorchControls
from healthcheck.trainers.native import NativeControls

CAPABILITIES = Capabilities(
    trainer="lightning",
    events=frozenset(EventKind) - {EventKind.TEST_START, EventKind.TEST_STEP, EventKind.TEST_END},
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps=dict.fromkeys(
        ("test_start", "test_step", "test_end"), "Lightning tests outside of fit(), when the run is over"
    ),
)


class Owner(Protocol):
    """The callback that these controls belong to."""

    @property
    def trainer(self) -> Any: ...
    def heed(self) -> None: ...
    def save_at_batch_end(self, path: Path | None) -> str: ...
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


class LightningControls(NativeControls):
    """Ends the loop through ``trainer.should_stop`` and saves through ``trainer.save_checkpoint``."""

    def __init__(self, base: TorchControls, owner: Owner) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def end_loop(self, reason: str) -> None:
        self._owner.heed()

    def save(self, path: Path | None) -> str:
        return self._owner.save_at_batch_end(path)

    def schedulers(self) -> Iterable[Any]:
        trainer = self._owner.trainer
        return [] if trainer is None else [config.scheduler for config in trainer.lr_scheduler_configs]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._owner.log_metrics(metrics, step)
