"""NeMo AutoModel: a mixin for its released recipes, and callback objects for them."""

from __future__ import annotations

from healthcheck.trainers.automodel.callback import (
    CAPABILITIES,
    EVENTS,
    LOG_PREFIX,
    AutoModelControls,
    Callback,
    CallbackRecipe,
    HealthCheckCallback,
    HealthCheckRecipe,
    attach,
    rank_zero_only,
)

__all__ = [
    "CAPABILITIES",
    "EVENTS",
    "LOG_PREFIX",
    "AutoModelControls",
    "Callback",
    "CallbackRecipe",
    "HealthCheckCallback",
    "HealthCheckRecipe",
    "attach",
    "rank_zero_only",
]
