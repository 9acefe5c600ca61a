"""The judging points of a run: samples to the mailbox and back, rules, actions, agreement of ranks.

The way of one step is written here from top to bottom: what the probes yielded is posted, what has
arrived is told to listeners and judged, alerts are told, their actions run, ranks exchange.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from healthcheck.acting import StopRequest
from healthcheck.engine.evaluation import Evaluation, step_by_step
from healthcheck.events import Event, EventKind

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

_DRAINED_AT = frozenset({EventKind.CHECKPOINT_SAVED, EventKind.TRAIN_END})
"""Events that wait for the values of the device: nothing may be left unjudged behind them."""


class Judge:
    """Judges the samples of one session. Called at :data:`JUDGED_AT` by the training thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._lock = threading.RLock()  # the watchdog judges silence from a thread of its own

    def __call__(self, event: Event) -> None:
        """Post the samples of this event, take what has arrived, judge it, act."""
        session = self.session
        with self._lock:
            if session.probing.pending:
                self._post(event)
            now = session.judged_at = session.active()
            prompt = session.prompt and event.kind is EventKind.BEFORE_UPDATE
            ready = session.mailbox.drain() if prompt or event.kind in _DRAINED_AT else session.mailbox.ready()
            if ready:
                session.history.remember(ready)
                session.dispatch.call("samples", event.step, session, event.step, ready)
                session.tell("samples", event.step, ready)
            if ready or event.kind is EventKind.STEP_END:
                for samples in step_by_step(ready):
                    self._handle(session.engine.evaluate(event.step, samples, now), event)
            if event.kind is EventKind.STEP_END:
                self._exchange(event.step)

    def tick(self, silent_seconds: float) -> None:
        """Judge ``stale`` rules from the watchdog thread; never blocks on a busy main thread."""
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            self._handle(self.session.engine.tick(silent_seconds, self.session.active()), None)
        finally:
            self._lock.release()

    def _post(self, event: Event) -> None:
        """Hand the samples to the mailbox; those of a device wait for the end of the step: one copy a step."""
        session = self.session
        samples = session.probing.take()
        if event.kind is EventKind.BEFORE_UPDATE:
            if session.before_post is not None:
                session.before_post(samples)
            if not session.prompt:
                late = [sample for sample in samples if _comes_late(sample.value)]
                if late:
                    session.probing.pending = late
                    samples = [sample for sample in samples if not _comes_late(sample.value)]
        if samples:
            session.mailbox.post(event.step, samples)

    def _handle(self, result: Evaluation, event: Event | None) -> None:
        if not result:
            return
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
            session.tell("cleared", alert)

    def _exchange(self, step: int) -> None:
        """Sync point of several ranks: act on what they have all agreed on."""
        session, controls = self.session, self.session.controls
        if controls is None or controls.agreement is None or controls.stop is not None:
            return
        decided = controls.agreement.exchange(step)
        if decided is None:
            return
        first, ranks = int(decided["step"]), decided["ranks"]
        where = f"rank {ranks[0]} only" if len(ranks) == 1 else f"{len(ranks)} of {session.info.world_size} ranks"
        session.note(f"all ranks stop at step {step:,}: {decided['rule']} on {where}, first seen at step {first:,}")
        for alert in session.alerts:
            if alert.rule == decided["rule"] and alert.acted_step is not None:
                alert.acted_step = step
        controls.agreed(
            StopRequest(decided["rule"], step, decided["reason"], decided["mode"], int(decided["exit_code"]))
        )


def _comes_late(value: Any) -> bool:
    """Whether a value is on a device, or will be made of some that are."""
    if isinstance(value, float):
        return False
    device = getattr(value, "device", None)
    return hasattr(value, "on_device") if device is None else getattr(device, "type", "cpu") != "cpu"
