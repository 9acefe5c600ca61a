"""What actions may do to a run, and running them: observe, then mitigate, then stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.alerts import OBSERVE_MODE, ActionOutcome, Alert, Finding, Severity
from healthcheck.core.errors import UsageError
from healthcheck.core.events import Event
from healthcheck.core.protocols import Action, ActionContext, Controls
from healthcheck.core.runinfo import Elsewhere, RunInfo
from healthcheck.core.text import plural
from healthcheck.core.text import step as step_words
from healthcheck.engine.columns import History
from healthcheck.engine.episodes import PlannedAction
from healthcheck.extend.guard import calls_foreign, describe, passes_on
from healthcheck.rulelang.rule import Cause, Mute, Origin

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.core.protocols import Capabilities, Device

CHECKPOINT = "checkpoint"
"""In place of a rule's id, in a proposal to save."""
MUTE = "mute"
"""In place of a rule's id, in a proposal to mute the one that the cause names."""
PACE = "watched steps"
"""In place of a rule's id, in a proposal to watch two steps in so many. No rule can have this id."""


class Agreement(Protocol):
    """How the ranks of one job decide together. Adapters give one to the session; plugins only see what comes of it."""

    @property
    def ready(self) -> bool:
        """Whether a proposal made now will be decided by all ranks."""

    @property
    def broken(self) -> str:
        """Why the ranks cannot agree; empty while they can."""

    def propose(self, request: Mapping[str, Any]) -> None:
        """Ask all ranks for something at the next sync point; with ``unanimous``, if all of them ask for it."""

    def withdraw(self, rule: str) -> None:
        """Ask no longer for what this rule wanted."""

    def exchange(self, step: int) -> Sequence[Mapping[str, Any]]:
        """At the end of every step on every rank: what all ranks do now, in this order."""

    def together(self, step: int) -> bool:
        """Whether all ranks know at this step that they agree, so that each holds back what the others do."""

    def close(self, failed: str = "", warned: str = "") -> Elsewhere:
        """This rank is done; the others must not wait for it. Returns for the rank that speaks what it hears of others.

        :param failed: what fails the run on this rank, in words; ``warned``: what it warns of and does not fail for.
        """

    @property
    def unheard(self) -> str:
        """After :meth:`close`: why the rank that speaks does not hear what this one has said; empty where it does."""

    def leave(self, *, failing: bool, hurried: Callable[[], bool]) -> None:
        """This rank's process exits next; with ``failing`` only once the others have finished as well."""


@dataclass(slots=True)
class StopRequest:
    """One request to end the run. The first one of a rule wins; later ones only add their rules to it."""

    rule: str
    """Empty for a stop that the user asked for (``--max-steps``)."""
    step: int
    reason: str
    mode: str = "graceful"
    exit_code: int = 1
    also: list[str] | None = None
    cause: str = ""
    """Name of the cause within the rule; empty if the rule is its own only cause."""

    @property
    def name(self) -> str:
        """``rule.cause``, or the rule."""
        return f"{self.rule}.{self.cause}" if self.cause else self.rule


class StopState:
    """Whether the run is to stop, and how far that has got. One object per session, and the only place that knows.

    Actions ask for a stop through the controls; what trains (an adapter, a loop) reads this object and ends.
    Once :attr:`request` is set it stays: a stop is never taken back.
    """

    def __init__(self, *, most_steps: int | None = None, most_seconds: float | None = None) -> None:
        self.most_steps = most_steps
        """The user's own end: the last step that is to be made (``--max-steps``). A test may set it for a block."""
        self.most_seconds = most_seconds
        """The same in seconds of active training (``--max-time``), counted from its first step."""
        self.interrupted = False
        """The user has pressed Ctrl-C, and the step at hand is still to end."""
        self._seconds_before: float | None = None
        self.request: StopRequest | None = None
        """The stop to carry out. With several ranks it appears here when all of them have agreed."""
        self.raised = 0
        """How often it was raised inside the training as ``StopTraining``."""
        self.hangs = False
        """True while the watchdog judges silence: other ranks cannot be asked before an abort."""
        self.by_framework = False
        """True while a framework ends its loop in its own way: nothing is raised meanwhile, and no update applied."""
        self.patience = 0
        """Steps that a framework may make after a stop; one that goes on then is ended by an exception."""

    def interrupt(self) -> None:
        """End the training between two steps with ``KeyboardInterrupt``."""
        self.interrupted, self._seconds_before = True, self.most_seconds
        self.most_seconds = 0.0  # whatever trains looks at the user's own end there

    def interrupt_is_over(self) -> None:
        """``KeyboardInterrupt`` is raised now; a script that catches it may go on."""
        if self.interrupted:
            self.interrupted, self.most_seconds = False, self._seconds_before


class SessionControls:
    """The trainer's controls, as the actions of one session use them.

    :param stop: the stop of the run, which :meth:`agreed` sets.
    :param info: how many ranks there are; a framework may correct that when training begins.
    :param note: says one line to the user.
    :param mute: silences a rule of this rank.
    :param watch_two_in: all ranks watch two steps in so many from now on.
    """

    def __init__(
        self,
        controls: Controls,
        *,
        stop: StopState,
        info: RunInfo,
        note: Callable[[str], None],
        mute: Callable[[Mute], None],
        watch_two_in: Callable[[int], None] = lambda every: None,
    ) -> None:
        self._controls = controls
        self._info = info
        self._note = note
        self._mute = mute
        self._watch_two_in = watch_two_in
        self.stop = stop
        self.agreement: Agreement | None = None
        self.may_skip = True
        """False while a rule acts that other ranks may not see: an update skipped here alone would set ranks apart."""
        self.acting: Finding | None = None
        """What the cause has found whose action runs just now."""
        self.order: Mapping[str, tuple[int, int]] = {}
        """``rule.cause`` -> (severity, place in the file): which of several proposals decides."""
        self.unanimous: Collection[str] = ()
        """Causes with ``ranks: all``: what they ask for is done only if every rank asks for it."""

    def agree_through(self, agreement: Agreement, causes: Iterable[Cause]) -> None:
        """From now on a stop is asked of all ranks."""
        self.agreement = agreement
        self.order = {cause.id: (int(cause.severity), place) for place, cause in enumerate(causes)}
        self.unanimous = {cause.id for cause in causes if cause.ranks == "all"}

    def take_over(self, controls: Controls) -> None:
        """Another trainer's controls from now on; a stop that was asked for already holds for it too."""
        self._controls = controls
        if self.stop.request is not None:
            self.agreed(self.stop.request)

    @property
    def capabilities(self) -> Capabilities:
        return self._controls.capabilities

    @property
    def device(self) -> Device:
        return self._controls.device

    # -- stop ---------------------------------------------------------------------------

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        known = self.stop.request
        cause = self.acting.cause if self.acting is not None else ""
        if known is not None and (known.rule or not rule):
            if rule and rule != known.rule:
                known.also = [*(known.also or []), rule]
            return
        if rule and self.agreement is not None and not (self.stop.hangs and mode == "abort"):
            name = f"{rule}.{cause}" if cause else rule
            severity, place = self.order.get(name, (0, 0))
            request = {"rule": rule, "cause": cause, "step": step, "reason": reason, "mode": mode}
            request |= {"exit_code": exit_code}
            unanimous = name in self.unanimous
            self.agreement.propose({**request, "severity": severity, "order": place, "unanimous": unanimous})
            return
        self.agreed(StopRequest(rule, step, reason, mode, exit_code, cause=cause))

    def recovered(self, names: Iterable[str]) -> None:
        """Causes fire no longer: where all ranks have to see the same, they no longer do."""
        for name in names if self.agreement is not None else ():
            if name in self.unanimous and self.agreement is not None:
                self.agreement.withdraw(name)

    def agreed(self, request: StopRequest) -> None:
        """The run stops: keep the request, and ask the trainer for it."""
        self.stop.request = request
        self._controls.request_stop(
            request.reason, rule=request.rule, step=request.step, mode=request.mode, exit_code=request.exit_code
        )

    # -- several ranks --------------------------------------------------------------------

    def exchange(self, step: int, alerts: Iterable[Alert]) -> None:
        """Sync point of several ranks, at the end of every step: do what all of them have agreed on.

        :param alerts: of this run so far; those of the rule that stops it are dated to the common step.
        """
        if self.agreement is None or self.stop.request is not None:
            return
        for decided in self.agreement.exchange(step):
            if decided["rule"] == CHECKPOINT:
                self._save(decided, step)
            elif decided["rule"] == MUTE:
                self._silence(decided["cause"], int(decided["steps"]), decided["reason"], step)
            elif decided["rule"] == PACE:
                self._watch_two_in(int(decided["every"]))
            else:
                self._stop(decided, step, alerts)

    def propose_pace(self, every: int, now: int) -> None:
        """Have all ranks watch the same steps, two in so many in place of ``now``, from a step on that they agree on."""
        if every != now and self.agreement is not None and not self.agreement.broken:
            self.agreement.propose({"rule": PACE, "every": every})

    def mute(self, rule: str, steps: int, reason: str, step: int) -> None:
        """Silence a rule, one cause of it or a glob from the next step on; with several ranks, once all of them do."""
        if self.agreement is None:
            self._silence(rule, steps, reason, step)
        elif self.agreement.broken:
            self._note(f"{rule} is not muted: ranks cannot agree ({self.agreement.broken})")
        else:
            self.agreement.propose({"rule": MUTE, "cause": rule, "steps": steps, "reason": reason})

    def _silence(self, rule: str, steps: int, reason: str, step: int) -> None:
        last = step + steps
        self._mute(Mute(rule, reason, step + 1, last, Origin("healthcheck mute")))
        self._note(f"{rule} is muted for {plural(steps, 'step')}, to step {step_words(last)}: {reason}")

    def _save(self, decided: Mapping[str, Any], step: int) -> None:
        """All ranks save now, at one place: the one that was asked for, else in the record of rank 0."""
        place = decided["path"]
        if not place and decided["folder"] and "checkpoint_path" not in self.capabilities.gaps:
            place = os.path.join(decided["folder"], "checkpoints", f"step-{step}")
        try:
            where = self._controls.request_checkpoint(Path(place) if place else None)
        except UsageError as error:
            self._note(f"no checkpoint at step {step:,}: {error}")
            return
        self._note(f"all ranks save at step {step:,}, as asked by rank {decided['rank']}: {where}")

    def _stop(self, decided: Mapping[str, Any], step: int, alerts: Iterable[Alert]) -> None:
        rule, first, ranks = decided["rule"], int(decided["step"]), decided["ranks"]
        where = f"rank {ranks[0]} only" if len(ranks) == 1 else f"{len(ranks)} of {self._info.world_size} ranks"
        request = StopRequest(
            rule, step, decided["reason"], decided["mode"], int(decided["exit_code"]), cause=decided.get("cause", "")
        )
        self._note(f"all ranks stop at step {step:,}: {request.name} on {where}, first seen at step {first:,}")
        for alert in alerts:
            if alert.rule == rule and alert.acted_step is not None:
                alert.acted_step = step
        self.agreed(request)

    # -- everything else --------------------------------------------------------------------

    def skip_update(self) -> bool:
        return self.may_skip and self._controls.skip_update()

    def gated(self, step: int, rule: str) -> bool:
        """Whether this rule's bound decided on the update of that step, before the rule was judged."""
        if self.acting is not None:
            step = self.acting.fired_step
            rule = f"{rule}.{self.acting.cause}" if self.acting.cause else rule
        controls = getattr(self._controls, "base", self._controls)
        gated = getattr(controls, "gated", None)
        return bool(gated is not None and gated(step, rule))

    def request_checkpoint(self, path: Path | None = None) -> str:
        """Save; with several ranks, which save together, propose it. Returns where.

        Raises ``UsageError`` where that cannot be.
        """
        if self._info.world_size < 2:
            return self._controls.request_checkpoint(path)
        why = getattr(self._controls, "ranks_cannot_save", "")
        if why or self.agreement is None:
            raise UsageError(why or f"{self._info.world_size} ranks cannot agree on it")
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already")
        self.agreement.propose({"rule": CHECKPOINT, "path": str(path or "")})
        return "on all ranks, at their next sync point"

    def scale_lr(self, factor: float) -> list[float]:
        return self._controls.scale_lr(factor)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._controls.log(metrics, step)


# --------------------------------------------------------------------------------------------------
# Running the planned actions of one evaluation: observe, then mitigate, then stop.


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
        for item in plan:
            if item.spec.name not in self.actions:
                item.alert.actions.append(ActionOutcome(item.spec.name, False, "its plugin is not loaded", step))
        # Within a stage the most severe alert comes first: the first stop is the cause.
        ordered = sorted(
            (item for item in plan if item.spec.name in self.actions),
            key=lambda item: (self._stage(item), -item.alert.severity if self._stage(item) == 2 else 0),
        )
        for item in ordered:
            action = self.actions[item.spec.name]
            why = item.held or self._why_not(item, action, controls.agreement)
            if why:
                if not item.held:
                    item.not_done()
                item.alert.actions.append(ActionOutcome(action.name, False, why, step, held=True))
                continue
            same = f"{action.name}:{sorted(item.spec.options.items(), key=str)}"
            if action.stage == "mitigate" and same in done:
                item.alert.actions.append(ActionOutcome(action.name, False, f"done for {done[same]}", step))
                continue
            done[same] = item.alert.rule
            controls.acting = item.alert.finding(item.cause.name)
            controls.may_skip = self._info.world_size < 2 or item.cause.selector.metric.startswith(_SAME_ON_ALL_RANKS)
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
        if self.observe or item.cause.mode == "observe":
            return OBSERVE_MODE
        ranks = self._info.world_size
        if ranks < 2:
            return ""
        if action.name in ("stop", "checkpoint") and (agreement is None or not agreement.ready):
            why = agreement.broken if agreement is not None else "no process group was seen"
            return f"{ranks} ranks cannot agree: {why}"
        if item.cause.ranks == "all" and action.stage != "stop":
            return f"{ranks} ranks: with `ranks: all` only a stop waits for all of them"
        if action.name in _PER_UPDATE and not item.cause.selector.metric.startswith(_SAME_ON_ALL_RANKS):
            return f"{ranks} ranks: only a rule on gradients, which are the same everywhere, may do this"
        if action.name in _PER_UPDATE and (agreement is None or not agreement.together(item.alert.detected_step)):
            why = agreement.broken if agreement is not None else "no process group was seen"
            return f"{ranks} ranks cannot agree: {why or 'not all of them have met yet'}"
        return ""

    @calls_foreign(lambda of: (of["action"].name, "action"))
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
            if not isinstance(outcome, ActionOutcome):
                raise TypeError(f"it returned a {type(outcome).__name__}, not an ActionOutcome")
        except BaseException as error:
            if passes_on(error):  # an action may stop the run in its own way
                raise
            text = describe(error)
            self.errors.append({"action": action.name, "rule": alert.rule, "step": step, "error": text})
            alert.actions.append(ActionOutcome(action.name, False, f"failed: {text}", step))
            item.not_done()
            return
        outcome.step = step
        if outcome.done:
            self._done[action.name] = self._done.get(action.name, 0) + 1
        if action.stage == "stop" and outcome.done and controls.agreement is not None and not controls.stop.hangs:
            asked, *more = outcome.text.split("; ")
            outcome.text = "; ".join((asked, "proposed to all ranks", *more))
        if action.stage != "observe" and outcome.done:
            alert.acted_step = step
        alert.actions.append(outcome)
