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
    from healthcheck.assembly import open_session
    from healthcheck.callback import Callback, rank_zero_only
    from healthcheck.errors import (
        HealthCheckError,
        PluginError,
        RuleFileError,
        StopTraining,
        UnknownHookError,
        UsageError,
    )
    from healthcheck.events import Event, EventKind, ModelView
    from healthcheck.hookspecs import hookimpl
    from healthcheck.protocols import (
        Action,
        ActionContext,
        Capabilities,
        Comparator,
        Condition,
        ConditionType,
        Controls,
        Demand,
        Device,
        Position,
        Probe,
        Reader,
        Report,
        Scorer,
    )
    from healthcheck.readers.find import find_runs, read_run
    from healthcheck.samples import Cost, Metric, Sample
    from healthcheck.session import Session
    from healthcheck.trainers.current import current, log, metric
    from healthcheck.trainers.loop import watch
    from healthcheck.verdicts import ActionOutcome, Alert, SeriesFact, Severity, State, Transition

_HOME = {
    "Action": "protocols",
    "ActionContext": "protocols",
    "ActionOutcome": "verdicts",
    "Alert": "verdicts",
    "Callback": "callback",
    "Capabilities": "protocols",
    "Comparator": "protocols",
    "Condition": "protocols",
    "ConditionType": "protocols",
    "Controls": "protocols",
    "Cost": "samples",
    "Demand": "protocols",
    "Device": "protocols",
    "Event": "events",
    "EventKind": "events",
    "HealthCheckError": "errors",
    "Metric": "samples",
    "ModelView": "events",
    "PluginError": "errors",
    "Position": "protocols",
    "Probe": "protocols",
    "Reader": "protocols",
    "Report": "protocols",
    "RuleFileError": "errors",
    "Sample": "samples",
    "Scorer": "protocols",
    "SeriesFact": "verdicts",
    "Session": "session",
    "Severity": "verdicts",
    "State": "verdicts",
    "StopTraining": "errors",
    "Transition": "verdicts",
    "UnknownHookError": "errors",
    "UsageError": "errors",
    "current": "trainers.current",
    "find_runs": "readers.find",
    "hookimpl": "hookspecs",
    "log": "trainers.current",
    "metric": "trainers.current",
    "open_session": "assembly",
    "rank_zero_only": "callback",
    "read_run": "readers.find",
    "watch": "trainers.loop",
}

__all__ = [
    "Action",
    "ActionContext",
    "ActionOutcome",
    "Alert",
    "Callback",
    "Capabilities",
    "Comparator",
    "Condition",
    "ConditionType",
    "Controls",
    "Cost",
    "Demand",
    "Device",
    "Event",
    "EventKind",
    "HealthCheckError",
    "Metric",
    "ModelView",
    "PluginError",
    "Position",
    "Probe",
    "Reader",
    "Report",
    "RuleFileError",
    "Sample",
    "Scorer",
    "SeriesFact",
    "Session",
    "Severity",
    "State",
    "StopTraining",
    "Transition",
    "UnknownHookError",
    "UsageError",
    "__version__",
    "current",
    "find_runs",
    "hookimpl",
    "log",
    "metric",
    "open_session",
    "rank_zero_only",
    "read_run",
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
