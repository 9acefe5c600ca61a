"""The public names, so that none appears or vanishes by accident. A change here belongs in the changelog."""

from __future__ import annotations

import healthcheck

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert healthcheck.__all__ == PUBLIC


def test_dir_shows_the_public_names() -> None:
    assert set(PUBLIC) <= set(dir(healthcheck))
