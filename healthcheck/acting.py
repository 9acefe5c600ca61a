"""Running the planned actions of one evaluation: observe, then mitigate, then stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from healthcheck.dispatch import from_signal_handler
from healthcheck.engine.planning import PlannedAction
from healthcheck.errors import StopTraining
from healthcheck.events import Event
from healthcheck.latch import LatchingControls
from healthcheck.probing import History
from healthcheck.protocols import Action, ActionContext, Agreement, Controls
from healthcheck.verdicts import ActionOutcome, Alert, Severity

_STAGES = {"observe": 0, "mitigate": 1, "stop": 2}
_PER_UPDATE = ("skip_update", "scale_lr")
"""Actions that make ranks differ if only some of them take them."""
_SAME_ON_ALL_RANKS = ("grad", "amp.", "lr")


class Actor:
    """Runs actions for one session; keeps what went wrong."""

    def __init__(
        self,
        actions: Mapping[str, Action],
        *,
        observe: bool,
        world_size: int,
        run_dir: Path | None,
        history: History,
        say: Callable[[str], None],
    ) -> None:
        self.actions = actions
        self.observe = observe
        self.world_size = world_size
        self.run_dir = run_dir
        self.history = history
        self.say = say
        self.errors: list[dict[str, Any]] = []

    def run(self, plan: list[PlannedAction], controls: LatchingControls, step: int, event: Event | None) -> None:
        """Run a plan in stage order; outcomes go into each alert's ``actions``."""
        done: dict[str, str] = {}
        # Within a stage the most severe alert comes first: the first stop is the cause.
        ordered = sorted(
            (item for item in plan if item.spec.name in self.actions),
            key=lambda item: (self._stage(item), -item.alert.severity if self._stage(item) == 2 else 0),
        )
        for item in ordered:
            action = self.actions[item.spec.name]
            why = item.held or self._held(item, action, controls.agreement)
            if why:
                item.alert.actions.append(ActionOutcome(action.name, False, why, step, held=True))
                continue
            same = f"{action.name}:{sorted(item.spec.options.items(), key=str)}"
            if action.stage == "mitigate" and same in done:
                item.alert.actions.append(ActionOutcome(action.name, False, f"done for {done[same]}", step))
                continue
            done[same] = item.alert.rule
            controls.may_skip = self.world_size < 2 or item.rule.selector.metric.startswith(_SAME_ON_ALL_RANKS)
            self._run_one(action, item, controls, step, event)

    def emergency(self, name: str, controls: Controls, step: int) -> str | None:
        """Run an action that no rule asked for; returns what it did, None if there is no such action."""
        action = self.actions.get(name)
        if action is None or self.observe:
            return None
        alert = Alert("", 0, Severity.INFO, "train", 0, step, step, 0.0, None, None, "", [], 0)
        context = ActionContext({"cooldown": 0}, controls, step, False, self.run_dir, self.history, say=self.say)
        return action.run(alert, context).text

    def _stage(self, item: PlannedAction) -> int:
        return _STAGES[self.actions[item.spec.name].stage]

    def _held(self, item: PlannedAction, action: Action, agreement: Agreement | None) -> str:
        if action.stage == "observe":
            return ""
        if self.observe or item.rule.mode == "observe":
            return "observe mode"
        if self.world_size < 2:
            return ""
        if action.name in ("stop", "checkpoint") and (agreement is None or not agreement.ready):
            why = agreement.broken if agreement is not None else "no process group was seen"
            return f"{self.world_size} ranks cannot agree: {why}"
        if item.rule.ranks == "all" and action.stage != "stop":
            return f"{self.world_size} ranks: with `ranks: all` only a stop waits for all of them"
        if action.name in _PER_UPDATE and not item.rule.selector.metric.startswith(_SAME_ON_ALL_RANKS):
            return f"{self.world_size} ranks: only a rule on gradients, which are the same everywhere, may do this"
        return ""

    def _run_one(
        self, action: Action, item: PlannedAction, controls: LatchingControls, step: int, event: Event | None
    ) -> None:
        alert: Alert = item.alert
        context = ActionContext(
            options=item.spec.options,
            controls=controls,
            step=step,
            before_update=event is not None and event.kind.value == "before_update",
            run_dir=self.run_dir,
            history=self.history,
            series=self.history.series,
            event=event,
            say=self.say,
        )
        try:
            outcome = action.run(alert, context)
        except StopTraining:
            raise
        except (Exception, SystemExit) as error:
            if from_signal_handler(error):
                raise
            text = f"{type(error).__name__}: {error}"
            self.errors.append({"action": action.name, "rule": alert.rule, "step": step, "error": text})
            alert.actions.append(ActionOutcome(action.name, False, f"failed: {text}", step))
            return
        outcome.step = step
        if action.stage == "stop" and outcome.done and controls.agreement is not None:
            outcome.text += "; proposed to all ranks"
        if action.stage != "observe" and outcome.done:
            alert.acted_step = step
        alert.actions.append(outcome)
