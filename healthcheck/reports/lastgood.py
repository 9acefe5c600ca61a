"""The last checkpoint that was written while everything was finite: the one to resume from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from healthcheck.verdicts import Alert

if TYPE_CHECKING:
    from healthcheck.rulelang.rule import Rule
    from healthcheck.session import Session


class LastGoodReport:
    """Adds ``last_good_checkpoint`` to the report. Comes before the record, so that ``report.json`` has it.

    Good means: no alert of a rule for non-finite values was open at the step of the checkpoint, a
    later one has not overwritten it, and it is still there. What no rule looked at is not vouched for:
    without such a rule no checkpoint is named.
    """

    name = "last-good"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._saved: dict[str, int] = {}
        """Path -> step of its last writing, in the order of writing."""

    def start(self, session: Session) -> None:
        self._session = session
        if any(judges_finiteness(rule) for rule in session.rules.rules):
            session.on("checkpoint_saved", self._checkpoint)

    def _checkpoint(self, event: Any) -> None:
        if event.path:
            path = os.path.abspath(event.path)
            self._saved.pop(path, None)
            self._saved[path] = event.step

    def finish(self, report: dict[str, Any]) -> None:
        if self._session is None or os.getpid() != self._session.pid:
            return
        watched = {rule.id for rule in self._session.rules.rules if judges_finiteness(rule)}
        bad = [alert for alert in self._session.alerts if alert.rule in watched]
        for path, step in reversed(self._saved.items()):
            if not covered(step, bad) and os.path.exists(path):
                report["last_good_checkpoint"] = {"path": path, "step": step, "needed": bool(bad)}
                return


def judges_finiteness(rule: Rule) -> bool:
    """Whether an alert of this rule says that something was NaN or infinite."""
    return rule.condition.judges_nonfinite or rule.selector.metric.endswith(".nonfinite")


def covered(step: int, alerts: Iterable[Alert]) -> bool:
    """Whether one of the alerts was open at a step."""
    return any(a.fired_step <= step and (a.cleared_step is None or step < a.cleared_step) for a in alerts)
