"""The judging points of a run: samples to the mailbox and back, rules, actions, agreement of ranks.

The way of one step is written here from top to bottom: what the probes yielded is posted, what has
arrived is told to listeners and judged, alerts are told, their actions run, ranks exchange.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.engine.evaluation import Evaluation, step_by_step
from healthcheck.errors import UsageError
from healthcheck.events import Event, EventKind
from healthcheck.latch import CHECKPOINT, LatchingControls, StopRequest
from healthcheck.protocols import Agreement

if TYPE_CHECKING:
    from healthcheck.session import Session

JUDGED_AT = frozenset(
    {
        EventKind.BEFORE_UPDATE,
        EventKind.STEP_END,
        EventKind.EVAL_END,
        EventKind.TEST_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
        EventKind.TRAIN_END,
    }
)
"""Events at which samples are judged. Before the update, so that it can still be held back."""

_METRIC = operator.attrgetter("metric")
_MAY_WAIT = frozenset({EventKind.BEFORE_UPDATE, EventKind.STEP_END})
_DRAINED_AT = frozenset({EventKind.CHECKPOINT_SAVED, EventKind.TRAIN_END})
"""Events that wait for the values of the device: nothing may be left unjudged behind them."""


class Judge:
    """Judges the samples of one session. Called at :data:`JUDGED_AT` by the training thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # the watchdog judges silence from a thread of its own
        self._acting: frozenset[str] | None = None

    def __call__(self, event: Event, now: float) -> None:
        """Post the samples of this event, take what has arrived, judge it, act.

        :param now: seconds of active training.
        """
        session = self.session
        with self._lock:
            urgent = bool(session.probing.pending) and self._post(event)
            if event.kind in _MAY_WAIT and not urgent and self._waits(event):
                return
            session.judged_at = now
            prompt = session.prompt and event.kind is EventKind.BEFORE_UPDATE
            ready = session.mailbox.drain() if prompt or event.kind in _DRAINED_AT else session.mailbox.ready()
            if ready:
                session.history.remember(ready)
                if session.dispatch.table.get("samples"):
                    session.dispatch.call("samples", event.step, session, event.step, ready)
                session.tell("samples", event.step, ready)
            if ready or event.kind is EventKind.STEP_END:
                for samples in step_by_step(ready):
                    result = session.engine.evaluate(event.step, samples, now)
                    if result:
                        self._handle(result, event)
            if (
                event.kind is EventKind.STEP_END
                and session.controls is not None
                and session.controls.agreement is not None
            ):
                self._exchange(session.controls, session.controls.agreement, event.step)

    def _waits(self, event: Event) -> bool:
        """Whether values that come late anyhow are left for the next look: two steps are judged in one go.

        A judgement costs more to begin with than to go on with. Values of a device are judged at the end of every
        second step, so at most two steps after their own; where they take longer, at every chance.
        """
        session = self.session
        oldest = getattr(session.mailbox, "oldest", None)
        if oldest is None or session.prompt:
            return False
        if session.controls is not None and session.controls.agreement is not None:
            return False
        step = event.step
        return bool(oldest >= step - 1 and (event.kind is EventKind.BEFORE_UPDATE or step % 2 == 1))

    def tick(self, silent_seconds: float) -> None:
        """Judge ``stale`` rules from the watchdog thread; never blocks on a busy main thread."""
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            result = self.session.engine.tick(silent_seconds, self.session.active())
            if result:
                self._handle(result, None)
        finally:
            self._lock.release()

    def _post(self, event: Event) -> bool:
        """Hand the samples to the mailbox; those of a device wait for the end of the step: one copy a step.

        Before the update only what a rule could act upon is worth a judgement of its own: if there is
        nothing of that kind, all wait for the end of the step. Returns whether there was something of that kind.
        """
        session = self.session
        probing = session.probing
        samples = probing.pending
        if event.kind is not EventKind.BEFORE_UPDATE:
            probing.pending = []
            session.mailbox.post(event.step, samples)
            return False
        if session.before_post is not None:
            session.before_post(samples)
        here, late = samples, []
        if not session.prompt:
            if self._acting is None:
                self._acting = _acted_upon(session)
            late = [s for s in samples if type(s.value) is not float and _comes_late(s.value)]
            if late:
                here = [s for s in samples if type(s.value) is float or not _comes_late(s.value)]
            if self._acting.isdisjoint(map(_METRIC, here)):
                return False
        probing.pending = late
        session.mailbox.post(event.step, here)
        return True

    def _handle(self, result: Evaluation, event: Event | None) -> None:
        session = self.session
        for transition in result.transitions:
            session.dispatch.call("transition", session.step, session, transition)
            session.tell("transition", transition)
        for alert in result.alerts:
            alert.accepted = session.accepted.reason(alert.rule, [f.name for f in alert.series], session.info.target)
            if not alert.repeat:
                session.alerts.append(alert)
            session.tell("alert", alert)
        if session.controls is not None:
            session.actor.run(result.plan, session.controls, session.step, event)
        for alert in result.alerts:
            session.tell("acted", alert)
            session.dispatch.call("alert", session.step, session, alert)
        for alert in result.cleared:
            if session.controls is not None:
                session.controls.cleared(alert.rule)
            session.tell("cleared", alert)

    def _exchange(self, controls: LatchingControls, agreement: Agreement, step: int) -> None:
        """Sync point of several ranks: act on what they have all agreed on."""
        if controls.stop is not None:
            return
        for decided in agreement.exchange(step):
            if decided["rule"] == CHECKPOINT:
                self._save(controls, decided, step)
            else:
                self._stop(controls, decided, step)

    def _save(self, controls: LatchingControls, decided: Mapping[str, Any], step: int) -> None:
        try:
            where = controls.agreed_checkpoint(decided, step)
        except UsageError as error:
            self.session.note(f"no checkpoint at step {step:,}: {error}")
            return
        self.session.note(f"all ranks save at step {step:,}, as asked by rank {decided['rank']}: {where}")

    def _stop(self, controls: LatchingControls, decided: Mapping[str, Any], step: int) -> None:
        session = self.session
        first, ranks = int(decided["step"]), decided["ranks"]
        where = f"rank {ranks[0]} only" if len(ranks) == 1 else f"{len(ranks)} of {session.info.world_size} ranks"
        session.note(f"all ranks stop at step {step:,}: {decided['rule']} on {where}, first seen at step {first:,}")
        for alert in session.alerts:
            if alert.rule == decided["rule"] and alert.acted_step is not None:
                alert.acted_step = step
        controls.agreed(
            StopRequest(decided["rule"], step, decided["reason"], decided["mode"], int(decided["exit_code"]))
        )


def _acted_upon(session: Session) -> frozenset[str]:
    """Metrics that a rule looks at whose action changes the run or asks to come before the update, with what
    they are made of."""
    actions = session.actor.actions
    wanted: list[str] = []
    for rule in session.rules.rules:
        known = (actions.get(spec.name) for spec in rule.actions)
        if any(a is not None and (a.stage != "observe" or getattr(a, "before_update", False)) for a in known):
            wanted.append(rule.selector.metric)
            wanted += [selector.metric for selector, _ in getattr(rule.condition, "parts", ()) if selector is not None]
            wanted += [guard.metric for guard in rule.only_if]
    formulas = {derived.name: derived.inputs for derived in session.rules.derived}
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += formulas.get(name, ())
    return frozenset(found)


def _comes_late(value: Any) -> bool:
    """Whether a value is on a device, or will be made of some that are."""
    if isinstance(value, float):
        return False
    device = getattr(value, "device", None)
    return hasattr(value, "on_device") if device is None else getattr(device, "type", "cpu") != "cpu"
