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
        EMPTY,
        FINITE,
        AbsenceScorer,
        Action,
        ActionContext,
        Bound,
        Capabilities,
        Comparator,
        Condition,
        ConditionType,
        Controls,
        Demand,
        Device,
        OtherPart,
        Position,
        Probe,
        Reader,
        Report,
        Scored,
        Scorer,
    )
    from healthcheck.readers.find import find_runs, read_run
    from healthcheck.rulelang.comparators import Threshold, exact_bound
    from healthcheck.rulelang.conditions.base import CompiledCondition, OptionError
    from healthcheck.rulelang.conditions.learning import Learning
    from healthcheck.samples import Cost, Metric, Sample
    from healthcheck.session import Session
    from healthcheck.trainers.current import current, log, metric
    from healthcheck.trainers.loop import watch
    from healthcheck.verdicts import ActionOutcome, Alert, SeriesFact, Severity, State, Transition

_HOME = {
    "Action": "protocols",
    "AbsenceScorer": "protocols",
    "ActionContext": "protocols",
    "ActionOutcome": "verdicts",
    "Alert": "verdicts",
    "Bound": "protocols",
    "Callback": "callback",
    "Capabilities": "protocols",
    "Comparator": "protocols",
    "CompiledCondition": "rulelang.conditions.base",
    "Condition": "protocols",
    "ConditionType": "protocols",
    "Controls": "protocols",
    "Cost": "samples",
    "Demand": "protocols",
    "Device": "protocols",
    "EMPTY": "protocols",
    "Event": "events",
    "EventKind": "events",
    "FINITE": "protocols",
    "HealthCheckError": "errors",
    "Learning": "rulelang.conditions.learning",
    "Metric": "samples",
    "ModelView": "events",
    "OptionError": "rulelang.conditions.base",
    "OtherPart": "protocols",
    "PluginError": "errors",
    "Position": "protocols",
    "Probe": "protocols",
    "Reader": "protocols",
    "Report": "protocols",
    "RuleFileError": "errors",
    "Sample": "samples",
    "Scorer": "protocols",
    "SeriesFact": "verdicts",
    "Scored": "protocols",
    "Session": "session",
    "Severity": "verdicts",
    "State": "verdicts",
    "StopTraining": "errors",
    "Transition": "verdicts",
    "UnknownHookError": "errors",
    "UsageError": "errors",
    "current": "trainers.current",
    "find_runs": "readers.find",
    "Threshold": "rulelang.comparators",
    "exact_bound": "rulelang.comparators",
    "hookimpl": "hookspecs",
    "log": "trainers.current",
    "metric": "trainers.current",
    "open_session": "assembly",
    "rank_zero_only": "callback",
    "read_run": "readers.find",
    "watch": "trainers.loop",
}

__all__ = [
    "EMPTY",
    "FINITE",
    "AbsenceScorer",
    "Action",
    "ActionContext",
    "ActionOutcome",
    "Alert",
    "Bound",
    "Callback",
    "Capabilities",
    "Comparator",
    "CompiledCondition",
    "Condition",
    "ConditionType",
    "Controls",
    "Cost",
    "Demand",
    "Device",
    "Event",
    "EventKind",
    "HealthCheckError",
    "Learning",
    "Metric",
    "ModelView",
    "OptionError",
    "OtherPart",
    "PluginError",
    "Position",
    "Probe",
    "Reader",
    "Report",
    "RuleFileError",
    "Sample",
    "Scored",
    "Scorer",
    "SeriesFact",
    "Session",
    "Severity",
    "State",
    "StopTraining",
    "Threshold",
    "Transition",
    "UnknownHookError",
    "UsageError",
    "__version__",
    "current",
    "exact_bound",
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
