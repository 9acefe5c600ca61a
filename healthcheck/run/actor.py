"""Running the planned actions of one evaluation: observe, then mitigate, then stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.core.alerts import OBSERVE_MODE, ActionOutcome, Alert, Severity
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import Event
from healthcheck.core.protocols import Action, ActionContext, Agreement, Controls
from healthcheck.core.runinfo import RunInfo
from healthcheck.core.samples import History
from healthcheck.engine.evaluation import PlannedAction
from healthcheck.extend.dispatch import from_signal_handler
from healthcheck.run.controls import SessionControls

_STAGES = {"observe": 0, "mitigate": 1, "stop": 2}
_PER_UPDATE = ("skip_update", "scale_lr")
"""Actions that make ranks differ if only some of them take them."""
_SAME_ON_ALL_RANKS = ("grad", "amp.", "lr")


class Actor:
    """Runs actions for one session; keeps what went wrong.

    :param observe: nothing that changes the run is done.
    :param info: how many ranks there are, and where the record lies.
    :param history: what actions may look back at.
    :param done: counts, by name, how often an action has done something.
    :param say: one line for the console.
    """

    def __init__(
        self,
        actions: Mapping[str, Action],
        *,
        observe: bool,
        info: RunInfo,
        history: History,
        done: dict[str, int],
        say: Callable[[str], None],
    ) -> None:
        self.actions = actions
        self.observe = observe
        self.errors: list[dict[str, Any]] = []
        """Actions that raised, as they stand in the report."""
        self._info = info
        self._history = history
        self._done = done
        self._say = say

    def run(self, plan: list[PlannedAction], controls: SessionControls, step: int, event: Event | None) -> None:
        """Run a plan in stage order; outcomes go into each alert's ``actions``."""
        done: dict[str, str] = {}
        # Within a stage the most severe alert comes first: the first stop is the cause.
        ordered = sorted(
            (item for item in plan if item.spec.name in self.actions),
            key=lambda item: (self._stage(item), -item.alert.severity if self._stage(item) == 2 else 0),
        )
        for item in ordered:
            action = self.actions[item.spec.name]
            why = item.held or self._why_not(item, action, controls.agreement)
            if why:
                item.alert.actions.append(ActionOutcome(action.name, False, why, step, held=True))
                continue
            same = f"{action.name}:{sorted(item.spec.options.items(), key=str)}"
            if action.stage == "mitigate" and same in done:
                item.alert.actions.append(ActionOutcome(action.name, False, f"done for {done[same]}", step))
                continue
            done[same] = item.alert.rule
            controls.may_skip = self._info.world_size < 2 or item.rule.selector.metric.startswith(_SAME_ON_ALL_RANKS)
            self._run_one(action, item, controls, step, event)

    def emergency(self, name: str, controls: Controls, step: int) -> str | None:
        """Run an action that no rule asked for; returns what it did, None if there is no such action."""
        action = self.actions.get(name)
        if action is None or self.observe:
            return None
        alert = Alert("", 0, Severity.INFO, "train", 0, step, step, 0.0, None, None, "", [], 0)
        context = ActionContext(
            {"cooldown": 0}, controls, step, False, self._info.run_dir, self._history, say=self._say
        )
        return action.run(alert, context).text

    def _stage(self, item: PlannedAction) -> int:
        return _STAGES[self.actions[item.spec.name].stage]

    def _why_not(self, item: PlannedAction, action: Action, agreement: Agreement | None) -> str:
        """Why an action must not run now, for the report; empty if it may."""
        if action.stage == "observe":
            return ""
        if self.observe or item.rule.mode == "observe":
            return OBSERVE_MODE
        ranks = self._info.world_size
        if ranks < 2:
            return ""
        if action.name in ("stop", "checkpoint") and (agreement is None or not agreement.ready):
            why = agreement.broken if agreement is not None else "no process group was seen"
            return f"{ranks} ranks cannot agree: {why}"
        if item.rule.ranks == "all" and action.stage != "stop":
            return f"{ranks} ranks: with `ranks: all` only a stop waits for all of them"
        if action.name in _PER_UPDATE and not item.rule.selector.metric.startswith(_SAME_ON_ALL_RANKS):
            return f"{ranks} ranks: only a rule on gradients, which are the same everywhere, may do this"
        return ""

    def _run_one(
        self, action: Action, item: PlannedAction, controls: SessionControls, step: int, event: Event | None
    ) -> None:
        alert: Alert = item.alert
        context = ActionContext(
            options=item.spec.options,
            controls=controls,
            step=step,
            before_update=event is not None and event.kind.value == "before_update",
            run_dir=self._info.run_dir,
            history=self._history,
            series=self._history.series,
            event=event,
            say=self._say,
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
        if outcome.done:
            self._done[action.name] = self._done.get(action.name, 0) + 1
        if action.stage == "stop" and outcome.done and controls.agreement is not None:
            outcome.text += "; proposed to all ranks"
        if action.stage != "observe" and outcome.done:
            alert.acted_step = step
        alert.actions.append(outcome)
