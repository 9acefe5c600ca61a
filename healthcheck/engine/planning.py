"""From alerts to the actions that run: order, repetition, what is held back and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from healthcheck.rulelang.rule import ActionSpec, Rule
from healthcheck.verdicts import Alert

if TYPE_CHECKING:
    from healthcheck.engine.rulestate import RuleState


@dataclass(slots=True)
class PlannedAction:
    """One action for one alert. ``held`` says why it must not run, or is empty."""

    rule: Rule
    alert: Alert
    spec: ActionSpec
    held: str = ""


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
