"""What one evaluation brings: alerts, who has a say in them, and the actions that run.

Explanations, mutes, and records that do not know a guard change what an alert means; order, repetition and the reason
why an action is held back make the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.alerts import Alert, Severity, Transition
from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.rule import ActionSpec, Mute, Rule


@dataclass(slots=True)
class PlannedAction:
    """One action for one alert. ``held`` says why it must not run, or is empty."""

    rule: Rule
    alert: Alert
    spec: ActionSpec
    held: str = ""


@dataclass(slots=True)
class Evaluation:
    """What one evaluation brought. Empty most of the time."""

    alerts: list[Alert] = field(default_factory=list)
    """New episodes and repeats under ``cooldown``, in file order."""
    cleared: list[Alert] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    plan: list[PlannedAction] = field(default_factory=list)
    """Actions in the order in which they must run."""

    def __bool__(self) -> bool:
        return bool(self.alerts or self.cleared or self.transitions)


NOTHING = Evaluation()


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
        "window": rule.condition.window,
        "step": alert.fired_step,
        "epoch": None,
        "rule": alert.rule,
        "series": alert.series[0].name if alert.series else rule.selector.metric,
        "rank": alert.rank,
        "count": alert.count,
    }
    return rule.message(fields)


def plan_actions(acting: list[tuple[RuleState, Alert]], step: int) -> list[PlannedAction]:
    """All actions of one evaluation, in file order; the caller sorts them by stage.

    An alert that another explains, that is muted, or that returns within its ``cooldown`` keeps
    its actions in the plan, held: the report says what would have been done.
    """
    plan = []
    for state, alert in acting:
        held = _why_held(state, alert, step)
        if not held:
            state.action_runs += 1
            state.last_action_step = step
        for spec in state.rule.actions:
            if not held and state.action_runs < spec.after:
                continue
            plan.append(PlannedAction(state.rule, alert, spec, held))
    return plan


def _why_held(state: RuleState, alert: Alert, step: int) -> str:
    if alert.muted:
        return f"muted: {alert.muted}"
    if alert.explained_by:
        return f"explained by {alert.explained_by}"
    cooldown = state.rule.cooldown
    if cooldown is not None and state.last_action_step is not None and step - state.last_action_step < cooldown:
        return f"within the cooldown of {cooldown} steps"
    return ""
