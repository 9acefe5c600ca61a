"""Dream Trainer 0.3.0: a callback for its ``CallbackCollection``."""

from __future__ import annotations

from healthcheck.trainers.dream.callback import CAPABILITIES, HealthCheckCallback, attach

__all__ = ["CAPABILITIES", "HealthCheckCallback", "attach"]
