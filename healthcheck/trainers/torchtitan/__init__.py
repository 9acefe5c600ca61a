"""torchtitan 0.3.0: a mixin for its ``Trainer``."""

from __future__ import annotations

from healthcheck.trainers.torchtitan.mixin import (
    CAPABILITIES,
    LOG_PREFIX,
    HealthCheckTrainer,
    TorchTitanControls,
    TrainerWatch,
    attach,
)

__all__ = ["CAPABILITIES", "LOG_PREFIX", "HealthCheckTrainer", "TorchTitanControls", "TrainerWatch", "attach"]
