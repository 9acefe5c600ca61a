"""The Trainer of Lightning, under both of its package names."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.lightning.controls import CAPABILITIES

if TYPE_CHECKING:
    from healthcheck.trainers.lightning.callback import HealthCheckCallback, attach
    from healthcheck.trainers.lightning.single import (
        AnomalyDetectorCallback,
        GradientMonitorCallback,
        LossMonitorCallback,
        MemoryMonitorCallback,
        ThroughputMonitorCallback,
        TrainingDashboardCallback,
        TrainingHealthCallback,
    )

__all__ = [
    "CAPABILITIES",
    "AnomalyDetectorCallback",
    "GradientMonitorCallback",
    "HealthCheckCallback",
    "LossMonitorCallback",
    "MemoryMonitorCallback",
    "ThroughputMonitorCallback",
    "TrainingDashboardCallback",
    "TrainingHealthCallback",
    "attach",
]

_HOMES = {
    "AnomalyDetectorCallback": "single",
    "GradientMonitorCallback": "single",
    "HealthCheckCallback": "callback",
    "LossMonitorCallback": "single",
    "MemoryMonitorCallback": "single",
    "ThroughputMonitorCallback": "single",
    "TrainingDashboardCallback": "single",
    "TrainingHealthCallback": "single",
    "attach": "callback",
}
"""Lazy: these import the framework, and what it can do must be known without it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
