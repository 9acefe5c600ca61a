"""What feeds a session from torch, for adapters that join it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthcheck.trainers.controls import TorchControls
    from healthcheck.trainers.native import NativeWatch
    from healthcheck.trainers.steps.training import TrainingSteps


@dataclass(slots=True)
class TorchSource:
    """What feeds a session from torch."""

    steps: TrainingSteps
    controls: TorchControls
    shared: bool = False
    """True if it sees every optimizer of the process (a script), so that a framework need not hook again."""
    watch: NativeWatch | None = None
    """The framework that is training now, if one is."""
    several: bool = False
    """True once the user knows that steps are counted on over several trainings."""
