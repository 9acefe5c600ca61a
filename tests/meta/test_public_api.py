"""The public names, so that none appears or vanishes by accident. A change here belongs in the changelog."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import healthcheck
from healthcheck import testing
from healthcheck.extend import hookspecs

STABILITY = Path(__file__).resolve().parents[2] / "docs" / "reference" / "stability.md"

PUBLIC = [
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


TESTING = [
    "FakeControls",
    "FakeModel",
    "FakeTrainer",
    "HealthCheckFailed",
    "Played",
    "check_plugin",
    "open_test_session",
    "play",
]


def test_the_public_names_are_these() -> None:
    assert healthcheck.__all__ == PUBLIC
    assert testing.__all__ == TESTING


@pytest.mark.parametrize("module", [healthcheck, testing], ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_said_on_the_page_about_stability(module: ModuleType) -> None:
    sections = re.split(r"^#+ ", STABILITY.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [section] = [s for s in sections if s.startswith(f"`{module.__name__}`\n")]
    listed = re.findall(r"`([A-Za-z_]\w*)`", section.split("\n", 1)[1])
    assert sorted(listed) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_dir_shows_the_public_names() -> None:
    assert set(PUBLIC) <= set(dir(healthcheck))


def test_the_classes_for_frameworks_that_the_page_promises_are_there() -> None:
    promised = promised_of_frameworks(STABILITY.read_text(encoding="utf-8"))
    assert len(promised) == 7
    for module, names in promised.items():
        assert names <= set(importlib.import_module(module).__all__), module


def promised_of_frameworks(page: str) -> dict[str, set[str]]:
    """Module -> names, of the section on frameworks."""
    listed = re.findall(r"^- `(healthcheck\.(?:trainers|instrument)\.\w+)`: ((?:`\w+`[,\s]*)+)", page, re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in listed}


def classes_named(module: ModuleType, only: str = "") -> Iterator[str]:
    """Our classes that the annotations of a module (or of one of its classes) name."""
    tree = ast.parse(inspect.getsource(module))
    ours = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    ours |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("healthcheck")
        for alias in node.names
        if alias.name[0].isupper() and isinstance(_defined(node.module or "", alias.name), type)
    }
    body: Any = [n for n in tree.body if getattr(n, "name", "") == only] if only else tree.body
    for node in (inner for outer in body for inner in ast.walk(outer)):
        annotations = [node.annotation] if isinstance(node, (ast.AnnAssign, ast.arg)) else []
        annotations += [node.returns] if isinstance(node, ast.FunctionDef) else []
        names = (n.id for a in annotations if a is not None for n in ast.walk(a) if isinstance(n, ast.Name))
        yield from (name for name in names if name in ours)


def _defined(module: str, name: str) -> Any:
    __import__(module)
    return getattr(sys.modules[module], name, None)


def test_what_a_hook_is_given_or_registers_can_be_annotated_with_public_names() -> None:
    """And what those hold, as far as it goes. `Session` is left out: its parts are not for plugins."""
    waiting, seen = set(classes_named(hookspecs)) - {"Session"}, set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        assert name in PUBLIC, f"a plugin author meets {name}; make it public"
        waiting |= set(classes_named(sys.modules[getattr(healthcheck, name).__module__], name)) - seen - {"Session"}
    assert {"Scorer", "Comparator", "Device", "Position", "State"} <= seen


@pytest.mark.parametrize("name", ["HealthCheckCallback", "LossMonitorCallback", "MemoryMonitoringCallback"])
def test_who_looks_for_a_callback_here_is_told_where_it_is(name: str) -> None:
    with pytest.raises(ImportError, match=rf"from healthcheck\.trainers\.\w+ import {name}"):
        exec(f"from healthcheck import {name}")
    assert not hasattr(healthcheck, name)
