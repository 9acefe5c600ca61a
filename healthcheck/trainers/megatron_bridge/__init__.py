"""Megatron Bridge 0.3.1 and later: a callback for ``pretrain`` and for ``CallbackManager``."""

from __future__ import annotations

from healthcheck.trainers.megatron_bridge.callback import CAPABILITIES, HealthCheckCallback, attach

__all__ = ["CAPABILITIES", "HealthCheckCallback", "attach"]
