"""pytest for PyTorch training runs: events, rules, alerts, actions.

Names are loaded on first use, so that ``import healthcheck`` costs next to nothing and imports
none of torch, yaml, jsonschema, rich or pytest.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from healthcheck.core import opener
from healthcheck.core.version import VERSION as __version__

if TYPE_CHECKING:
    from healthcheck.assembly import open_session
    from healthcheck.core.alerts import (
        ActionOutcome,
        Alert,
        CauseChange,
        Finding,
        Kind,
        SeriesFact,
        Severity,
        State,
        Transition,
    )
    from healthcheck.core.errors import (
        HealthCheckError,
        PluginError,
        RuleFileError,
        StopTraining,
        UnknownHookError,
        UsageError,
    )
    from healthcheck.core.events import Event, EventKind, ModelView
    from healthcheck.core.protocols import (
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
    from healthcheck.core.rows import StepRow, Update
    from healthcheck.core.runinfo import (
        Collectives,
        Habits,
        Places,
        PlateauUse,
        RankTalk,
        Replicas,
        RunFacts,
        StateLoads,
    )
    from healthcheck.core.samples import Cost, Metric, Sample
    from healthcheck.core.setting import Setting, SettingError
    from healthcheck.extend.background import BackgroundSender, NotSent, Undelivered
    from healthcheck.extend.callback import Callback, rank_zero_only
    from healthcheck.extend.hookspecs import hookimpl
    from healthcheck.extend.tracking import TrackedAlert, Tracker
    from healthcheck.instrument.loop import watch
    from healthcheck.probes.compilation import CompiledFunction, CompileLog, GraphBreak, Recompile, compile_log
    from healthcheck.readers.find import find_runs, read_run
    from healthcheck.rulelang.comparators import Threshold, exact_bound
    from healthcheck.rulelang.conditions.base import CompiledCondition, Learning, OptionError
    from healthcheck.run.current import current, log, metric
    from healthcheck.run.session import Session

_HOME = {
    "Action": "core.protocols",
    "AbsenceScorer": "core.protocols",
    "ActionContext": "core.protocols",
    "ActionOutcome": "core.alerts",
    "Alert": "core.alerts",
    "BackgroundSender": "extend.background",
    "Bound": "core.protocols",
    "Callback": "extend.callback",
    "Capabilities": "core.protocols",
    "Collectives": "core.runinfo",
    "Comparator": "core.protocols",
    "CompileLog": "probes.compilation",
    "CompiledCondition": "rulelang.conditions.base",
    "CompiledFunction": "probes.compilation",
    "Condition": "core.protocols",
    "ConditionType": "core.protocols",
    "Controls": "core.protocols",
    "Cost": "core.samples",
    "Demand": "core.protocols",
    "Device": "core.protocols",
    "EMPTY": "core.protocols",
    "CauseChange": "core.alerts",
    "Event": "core.events",
    "EventKind": "core.events",
    "FINITE": "core.protocols",
    "Finding": "core.alerts",
    "GraphBreak": "probes.compilation",
    "HealthCheckError": "core.errors",
    "Kind": "core.alerts",
    "Learning": "rulelang.conditions.base",
    "Metric": "core.samples",
    "ModelView": "core.events",
    "NotSent": "extend.background",
    "OptionError": "rulelang.conditions.base",
    "OtherPart": "core.protocols",
    "Places": "core.runinfo",
    "PluginError": "core.errors",
    "Position": "core.protocols",
    "Probe": "core.protocols",
    "RankTalk": "core.runinfo",
    "Reader": "core.protocols",
    "Recompile": "probes.compilation",
    "Replicas": "core.runinfo",
    "Habits": "core.runinfo",
    "PlateauUse": "core.runinfo",
    "Report": "core.protocols",
    "RuleFileError": "core.errors",
    "RunFacts": "core.runinfo",
    "Sample": "core.samples",
    "Scorer": "core.protocols",
    "SeriesFact": "core.alerts",
    "Scored": "core.protocols",
    "Session": "run.session",
    "Setting": "core.setting",
    "SettingError": "core.setting",
    "Severity": "core.alerts",
    "State": "core.alerts",
    "StateLoads": "core.runinfo",
    "StepRow": "core.rows",
    "StopTraining": "core.errors",
    "TrackedAlert": "extend.tracking",
    "Tracker": "extend.tracking",
    "Transition": "core.alerts",
    "Undelivered": "extend.background",
    "UnknownHookError": "core.errors",
    "UsageError": "core.errors",
    "Update": "core.rows",
    "compile_log": "probes.compilation",
    "current": "run.current",
    "find_runs": "readers.find",
    "Threshold": "rulelang.comparators",
    "exact_bound": "rulelang.comparators",
    "hookimpl": "extend.hookspecs",
    "log": "run.current",
    "metric": "run.current",
    "open_session": "assembly",
    "rank_zero_only": "extend.callback",
    "read_run": "readers.find",
    "watch": "instrument.loop",
}

__all__ = [
    "EMPTY",
    "FINITE",
    "AbsenceScorer",
    "Action",
    "ActionContext",
    "ActionOutcome",
    "Alert",
    "BackgroundSender",
    "Bound",
    "Callback",
    "Capabilities",
    "CauseChange",
    "Collectives",
    "Comparator",
    "CompileLog",
    "CompiledCondition",
    "CompiledFunction",
    "Condition",
    "ConditionType",
    "Controls",
    "Cost",
    "Demand",
    "Device",
    "Event",
    "EventKind",
    "Finding",
    "GraphBreak",
    "Habits",
    "HealthCheckError",
    "Kind",
    "Learning",
    "Metric",
    "ModelView",
    "NotSent",
    "OptionError",
    "OtherPart",
    "Places",
    "PlateauUse",
    "PluginError",
    "Position",
    "Probe",
    "RankTalk",
    "Reader",
    "Recompile",
    "Replicas",
    "Report",
    "RuleFileError",
    "RunFacts",
    "Sample",
    "Scored",
    "Scorer",
    "SeriesFact",
    "Session",
    "Setting",
    "SettingError",
    "Severity",
    "State",
    "StateLoads",
    "StepRow",
    "StopTraining",
    "Threshold",
    "TrackedAlert",
    "Tracker",
    "Transition",
    "Undelivered",
    "UnknownHookError",
    "Update",
    "UsageError",
    "__version__",
    "compile_log",
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


_OF_FRAMEWORKS = {
    "HealthCheckCallback": "each trainer has its own; from healthcheck.trainers.huggingface import HealthCheckCallback, "
    "or from .lightning, .megatron_bridge, .automodel, .dream; a plain loop takes healthcheck.watch()",
    "MemoryMonitoringCallback": "from healthcheck.trainers.huggingface import MemoryMonitoringCallback",
    **{
        name: f"from healthcheck.trainers.lightning import {name}"
        for name in (
            "AnomalyDetectorCallback", "GradientMonitorCallback", "LossMonitorCallback", "MemoryMonitorCallback",
            "ThroughputMonitorCallback", "TrainingDashboardCallback", "TrainingHealthCallback",
        )
    },
}  # fmt: skip
"""Names that people look for here, and where they are."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        if name in _OF_FRAMEWORKS:
            said = f"there is no healthcheck.{name}: {_OF_FRAMEWORKS[name]}"
            # `from healthcheck import NAME` puts a sentence of its own in place of an AttributeError's, and keeps an ImportError's.
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(said, name=__name__)
            raise AttributeError(said)
        # With both, the interpreter suggests the name that was meant.
        raise AttributeError(f"module 'healthcheck' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f"healthcheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
