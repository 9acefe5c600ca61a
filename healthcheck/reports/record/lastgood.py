"""The last checkpoint that was written while everything was finite: the one to resume from."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
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
        self._saved: dict[Any, Written] = {}
        """Checkpoints in the order of writing; by file, so that one that is overwritten is forgotten."""

    def start(self, session: Session) -> None:
        self._session = session
        if any(judges_finiteness(rule) for rule in session.rules.rules):
            session.on("checkpoint_saved", self._checkpoint)

    def _checkpoint(self, event: Any) -> None:
        if not event.path:
            return
        path = os.path.abspath(event.path)
        try:
            facts = os.stat(path)
        except OSError:
            return
        file = (facts.st_dev, facts.st_ino) if facts.st_ino else path
        self._saved.pop(file, None)
        self._saved[file] = Written(path, event.step, facts)

    def finish(self, report: dict[str, Any]) -> None:
        if self._session is None or os.getpid() != self._session.pid:
            return
        watched = {rule.id for rule in self._session.rules.rules if judges_finiteness(rule)}
        bad = [alert for alert in self._session.alerts if alert.rule in watched]
        for written in reversed(self._saved.values()):
            path = None if covered(written.step, bad) else written.path_now()
            if path is not None:
                report["last_good_checkpoint"] = {"path": path, "step": written.step, "needed": bool(bad)}
                return


@dataclass(frozen=True, slots=True)
class Written:
    """One checkpoint as it was written: a file, or a folder."""

    path: str
    step: int
    facts: os.stat_result

    def path_now(self) -> str | None:
        """Where it lies unchanged, also if it was renamed in its folder; None if it is gone."""
        with contextlib.suppress(OSError):
            if self._is(os.stat(self.path)):
                return self.path
        with contextlib.suppress(OSError), os.scandir(os.path.dirname(self.path)) as entries:
            for entry in entries:
                if self._is(os.stat(entry.path)):
                    return entry.path
        return None

    def _is(self, other: os.stat_result) -> bool:
        mine = self.facts
        same = (mine.st_dev, mine.st_ino) == (other.st_dev, other.st_ino)
        # A folder changes with every file that is added to it; it is known by itself.
        return same and (stat.S_ISDIR(mine.st_mode) or mine.st_mtime_ns == other.st_mtime_ns)


def judges_finiteness(rule: Rule) -> bool:
    """Whether an alert of this rule says that something was NaN or infinite."""
    return rule.condition.judges_nonfinite or rule.selector.metric.endswith(".nonfinite")


def covered(step: int, alerts: Iterable[Alert]) -> bool:
    """Whether one of the alerts was open at a step."""
    return any(a.fired_step <= step and (a.cleared_step is None or step < a.cleared_step) for a in alerts)
