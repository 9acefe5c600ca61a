"""pytest for PyTorch training runs: events, rules, alerts, actions.

Names are loaded on first use, so that ``import healthcheck`` costs next to nothing and imports
none of torch, yaml, jsonschema, rich or pytest.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from healthcheck import opener

__version__ = "0.1.0"

if TYPE_CHECKING:
    from healthcheck.callback import Callback, rank_zero_only
    from healthcheck.errors import (
        HealthCheckError,
        PluginError,
        RuleFileError,
        StopTraining,
        UnknownHookError,
        UsageError,
    )
    from healthcheck.events import Event, EventKind
    from healthcheck.hookspecs import hookimpl
    from healthcheck.protocols import ActionContext, Capabilities, ConditionType, Controls, Demand
    from healthcheck.samples import Cost, Metric, Sample
    from healthcheck.session import Session
    from healthcheck.trainers.current import current, log, metric
    from healthcheck.trainers.loop import watch
    from healthcheck.verdicts import ActionOutcome, Alert, Severity

_HOME = {
    "ActionContext": "protocols",
    "ActionOutcome": "verdicts",
    "Alert": "verdicts",
    "Callback": "callback",
    "Capabilities": "protocols",
    "ConditionType": "protocols",
    "Controls": "protocols",
    "Cost": "samples",
    "Demand": "protocols",
    "Event": "events",
    "EventKind": "events",
    "HealthCheckError": "errors",
    "Metric": "samples",
    "PluginError": "errors",
    "RuleFileError": "errors",
    "Sample": "samples",
    "Session": "session",
    "Severity": "verdicts",
    "StopTraining": "errors",
    "UnknownHookError": "errors",
    "UsageError": "errors",
    "current": "trainers.current",
    "hookimpl": "hookspecs",
    "log": "trainers.current",
    "metric": "trainers.current",
    "open_session": "assembly",
    "rank_zero_only": "callback",
    "watch": "trainers.loop",
}

__all__ = [
    "ActionContext",
    "ActionOutcome",
    "Alert",
    "Callback",
    "Capabilities",
    "ConditionType",
    "Controls",
    "Cost",
    "Demand",
    "Event",
    "EventKind",
    "HealthCheckError",
    "Metric",
    "PluginError",
    "RuleFileError",
    "Sample",
    "Session",
    "Severity",
    "StopTraining",
    "UnknownHookError",
    "UsageError",
    "__version__",
    "current",
    "hookimpl",
    "log",
    "metric",
    "open_session",
    "rank_zero_only",
    "watch",
]


def _open_session(options: Any) -> Any:
    return importlib.import_module("healthcheck.assembly").open_session(options)


opener.open_session = _open_session


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        # With both, the interpreter suggests the name that was meant.
        raise AttributeError(f"module 'healthcheck' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"healthcheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
