"""Performance tools for torch-healthcheck: profile, compile health, FSDP2 prefetch, float8, fault tolerance, bound analysis.

Use them from a rule file (``settings: {performance.profile: {wait: 10, active: 3}}``), as actions of rules
(``then: [performance.profile]``), as callbacks (``healthcheck.watch(..., callbacks=[Profile(wait=10)])``), or under the
names of Dream Trainer's documentation (``healthcheck_performance.callbacks``).

Nothing here imports torch before it is used: ``healthcheck check`` asks for metrics on machines that do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Action, Probe, Session, Setting, hookimpl

from healthcheck_performance.analysis import Verdict, analyse
from healthcheck_performance.command import HELP, main
from healthcheck_performance.compiling import COMPILE_SCHEMA, GraphBreakLog
from healthcheck_performance.float8 import FLOAT8_SCHEMA, Float8, Float8Probe
from healthcheck_performance.lighthouse import LIGHTHOUSE_HELP, lighthouse
from healthcheck_performance.monitors import Analyzer, CompileTimes, Memory, Reporter, Throughput, Warmup
from healthcheck_performance.prefetch import FSDP_SCHEMA, FSDPPrefetch
from healthcheck_performance.profiling import (
    PROFILE_SCHEMA,
    DriveProfiler,
    Profile,
    ProfileAction,
    ProfileOptions,
    profiler_of,
)
from healthcheck_performance.tolerance import FaultTolerance, FaultToleranceParameters, ReplicaProbe, start_lighthouse

__all__ = [
    "Analyzer",
    "CompileTimes",
    "DriveProfiler",
    "FSDPPrefetch",
    "FaultTolerance",
    "FaultToleranceParameters",
    "Float8",
    "GraphBreakLog",
    "Memory",
    "Profile",
    "ProfileOptions",
    "Reporter",
    "Throughput",
    "Verdict",
    "Warmup",
    "analyse",
    "start_lighthouse",
]

PACKS = Path(__file__).parent / "packs"
ANALYSIS_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "at": {"type": "integer", "minimum": 1, "description": "Step from which on some are recorded (default 30)."},
        "active": {
            "type": "integer",
            "minimum": 1,
            "maximum": 100,
            "description": "Steps that are recorded (default 4).",
        },
    },
}


@hookimpl
def healthcheck_register_probes(register: Callable[[Probe], None]) -> None:
    """Metrics ``performance.float8_*``, ``performance.replicas`` and others."""
    register(Float8Probe())
    register(ReplicaProbe())


@hookimpl
def healthcheck_register_actions(register: Callable[[Action], None]) -> None:
    """Action ``then: [performance.profile]``."""
    register(ProfileAction())


@hookimpl
def healthcheck_register_rulepacks(register: Callable[[str, str], None]) -> None:
    """Pack ``extends: ["healthcheck_performance:performance"]``."""
    register("performance", str(PACKS / "performance.yaml"))


@hookimpl
def healthcheck_register_settings(register: Callable[[Setting], None]) -> None:
    """Keys ``performance.*`` of ``settings:``."""
    register(
        Setting(
            "performance.profile",
            None,
            "Profile some steps on a schedule: wait, warm-up, active, repeat.",
            PROFILE_SCHEMA,
        )
    )
    register(
        Setting("performance.analysis", None, "Profile a few steps and say what the run is bound by.", ANALYSIS_SCHEMA)
    )
    register(
        Setting(
            "performance.compile",
            None,
            "Write graph breaks, recompilations and compile time to a file.",
            COMPILE_SCHEMA,
        )
    )
    register(Setting("performance.fsdp", None, "Prefetch FSDP2 modules in the order in which they run.", FSDP_SCHEMA))
    register(Setting("performance.float8", None, "Train linear layers in float8, through torchao.", FLOAT8_SCHEMA))


@hookimpl
def healthcheck_add_commands(register: Callable[[str, str, Callable[[list[str]], int]], None]) -> None:
    """Commands ``healthcheck profile`` and ``healthcheck lighthouse``."""
    register("profile", HELP, main)
    register("lighthouse", LIGHTHOUSE_HELP, lighthouse)


@hookimpl
def healthcheck_configure(session: Session) -> None:
    """Make the tools that the settings of the run ask for."""
    profiler_of(session)
    for name, make in _TOOLS.items():
        given = session.settings.get(name)
        if isinstance(given, Mapping):
            tool = make({_WORDS.get(str(key), str(key)): value for key, value in given.items()})
            tool.healthcheck_configure(session)
            session.user_state.setdefault("performance.tools", []).append(tool)


_WORDS = {"except": "exclude"}
_TOOLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "performance.profile": lambda given: Profile(**given),
    "performance.analysis": lambda given: Analyzer(**given),
    "performance.compile": lambda given: GraphBreakLog(**given),
    "performance.fsdp": lambda given: FSDPPrefetch(**given),
    "performance.float8": lambda given: Float8(**given),
}
"""Setting -> the tool."""


@hookimpl
def healthcheck_performance(session: Session, performance: dict[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Profiles and the verdict, whoever asked for them, and what tools from settings have to say."""
    found: dict[str, Mapping[str, Any]] = dict(profiler_of(session).findings())
    for tool in session.user_state.get("performance.tools", ()):
        tell = getattr(tool, "healthcheck_performance", None)
        if tell is not None:
            found.update(tell(session, performance) or {})
    return found
