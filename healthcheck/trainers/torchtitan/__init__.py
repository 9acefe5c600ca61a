"""torchtitan 0.3.0: a mixin for its ``Trainer``."""

from __future__ import annotations

from healthcheck.trainers.torchtitan.controls import CAPABILITIES, TorchTitanControls
from healthcheck.trainers.torchtitan.mixin import LOG_PREFIX, HealthCheckTrainer, TrainerWatch, attach

__all__ = ["CAPABILITIES", "LOG_PREFIX", "HealthCheckTrainer", "TorchTitanControls", "TrainerWatch", "attach"]
