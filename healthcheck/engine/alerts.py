"""What an alert says, and who has a say in it: explanations, mutes, records that do not know a guard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.rule import Mute, Rule
from healthcheck.verdicts import Alert, Severity


def explain(acting: Iterable[tuple[RuleState, Alert]], states: Iterable[RuleState]) -> None:
    """Mark alerts whose cause is an alert of another rule that fires now (``explains``)."""
    firing = [state.rule for state in states if state.firing]
    for _, alert in acting:
        alert.explained_by = next((rule.id for rule in firing if alert.rule in rule.explains), "")


def mute(alert: Alert, mutes: Iterable[Mute], hits: dict[int, int]) -> None:
    """Mark an alert that a mute covers; ``hits`` counts what each mute was good for."""
    for index, entry in enumerate(mutes):
        if entry.covers(alert.rule, alert.fired_step):
            alert.muted = entry.reason
            hits[index] = hits.get(index, 0) + 1


def cap(rule: Rule, alert: Alert, seen: Mapping[str, Any], known: Collection[str]) -> None:
    """In a record that cannot know a rule's guard, no alert of that rule is more than a warning."""
    unsaid = [
        guard.metric
        for guard in rule.only_if
        if guard.metric not in seen and guard.metric not in known and guard.test.text != "absent"
    ]
    if unsaid and alert.severity > Severity.WARNING:
        alert.severity = min(alert.severity, Severity.WARNING)
        alert.facts.setdefault("capped", "the record does not say " + ", ".join(unsaid))


def message(rule: Rule, alert: Alert) -> str:
    """The rule's message, its placeholders filled in."""
    assert rule.message is not None, "the rule compiler gives every rule a message"
    fields: dict[str, Any] = {
        "value": alert.value,
        "score": alert.score,
        "normal": alert.normal,
        "threshold": alert.threshold,
        "window": getattr(rule.condition, "window", None),
        "step": alert.fired_step,
        "epoch": None,
        "rule": alert.rule,
        "series": alert.series[0].name if alert.series else rule.selector.metric,
        "rank": alert.rank,
        "count": alert.count,
    }
    return rule.message(fields)
