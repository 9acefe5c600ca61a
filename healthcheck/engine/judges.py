"""Who judges the samples of one series."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState
from healthcheck.samples import Labels

Judge = tuple[RuleState, "SeriesState | None"]
"""A rule and its state of one series. None: it watches absence, or its guards have not held yet."""


def judges_of(states: Iterable[RuleState], labels: Labels, phase: str) -> list[Judge]:
    """Who judges samples with these labels and this phase, among the rules on their metric; in file order."""
    judges: list[Judge] = []
    for state in states:
        if state.phase not in ("any", phase) or state.across:
            continue
        if state.rule.condition.absence or (state.rule.only_if and labels not in state.series):
            if state.rule.selector.matches(labels):
                judges.append((state, None))
            continue
        series = state.state_of(labels)
        if series is not None:
            judges.append((state, series))
    return judges
