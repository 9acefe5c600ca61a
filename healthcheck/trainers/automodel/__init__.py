"""NeMo AutoModel: a mixin for its released recipes, and callback objects for them."""

from __future__ import annotations

from healthcheck.trainers.automodel.callback import (
    CAPABILITIES,
    LOG_PREFIX,
    AutoModelControls,
    HealthCheckCallback,
    HealthCheckRecipe,
    attach,
)
from healthcheck.trainers.automodel.callbacks import EVENTS, Callback, rank_zero_only
from healthcheck.trainers.automodel.recipe import CallbackRecipe

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
