"""The Trainer of transformers, and those of TRL that inherit from it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.huggingface.controls import CAPABILITIES

if TYPE_CHECKING:
    from healthcheck.trainers.huggingface.callback import HealthCheckCallback, attach
    from healthcheck.trainers.huggingface.memory import MemoryMonitoringCallback

__all__ = ["CAPABILITIES", "HealthCheckCallback", "MemoryMonitoringCallback", "attach"]

_HOMES = {"HealthCheckCallback": "callback", "MemoryMonitoringCallback": "memory", "attach": "callback"}
"""Lazy: these import the framework, and what it can do must be known without it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
