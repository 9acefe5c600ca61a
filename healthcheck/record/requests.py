"""What a person asks of a run that goes on: ``healthcheck mute`` and ``healthcheck evidence --now`` write it into the
run's folder, the run reads it.

A file and not a socket: it works on a login node over a shared file system, needs no open port, and only who may
write into the folder (mode 0700) may ask.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import Alert, Severity
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import ActionContext
from healthcheck.core.text import step
from healthcheck.record.folder import append

if TYPE_CHECKING:
    from healthcheck.core.events import Event
    from healthcheck.run.session import Session

FILE = "requests.jsonl"
LOOK_SECONDS = 1.0


def ask_to_mute(folder: Path, rule: str, steps: int, reason: str) -> None:
    """Leave the request; raises ``OSError`` where the folder cannot be written."""
    line = json.dumps({"mute": rule, "steps": steps, "reason": reason})
    append(folder / FILE, line.encode() + b"\n")


def ask_for_evidence(folder: Path) -> None:
    """Leave the request; raises ``OSError`` where the folder cannot be written."""
    append(folder / FILE, json.dumps({"evidence": "now"}).encode() + b"\n")


class LiveRequests:
    """The requests of one session. Its record looks for them every :data:`LOOK_SECONDS`."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._path = folder / FILE
        self._read = 0

    def look(self) -> None:
        """Do what has been asked for since the last look."""
        for request in self._new():
            if "evidence" in request:
                self._keep_evidence()
            else:
                self._mute(request)

    def _new(self) -> Iterator[dict[str, Any]]:
        """Requests that have come since the last look; half a line is left for the next one."""
        try:
            facts = os.stat(self._path)
            if facts.st_size <= self._read or (hasattr(os, "getuid") and facts.st_uid != os.getuid()):
                return  # nothing new, or a file that somebody else has laid there
            with open(self._path, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        whole = new.rfind(b"\n") + 1
        self._read += whole
        for line in new[:whole].splitlines():
            try:
                request = json.loads(line)
            except ValueError:
                continue
            if isinstance(request, dict):
                yield request

    def _keep_evidence(self) -> None:
        """At the end of the next step, where weights, gradients and perhaps the batch are at hand; once."""
        session = self._session
        done = False

        def once(session: Session, event: Event) -> None:
            nonlocal done
            if not done:
                done = True
                session.note(_kept(session, event))
            forget()

        forget = session.on(EventKind.STEP_END, once)

    def _mute(self, request: dict[str, Any]) -> None:
        session = self._session
        rule, steps, reason = request.get("mute"), request.get("steps"), request.get("reason")
        if not (isinstance(rule, str) and isinstance(steps, int) and isinstance(reason, str)):
            return
        if session.controls is not None:
            session.controls.mute(rule, steps, reason, session.step)


def _kept(session: Session, event: Event) -> str:
    """Run the action ``evidence`` as if a note had fired here, number 0; what it did in words."""
    action = session.host.registry.actions["evidence"]
    at = event.step
    alert = Alert(
        "asked-for", 0, Severity.INFO, "train", 0, at, at, 0.0, None, None, "", [], 0, message="a person asked for it"
    )
    assert session.controls is not None
    context = ActionContext(
        options={},
        controls=session.controls,
        step=at,
        before_update=False,
        run_dir=session.info.run_dir,
        history=session.history,
        series=session.history.series,
        event=event,
    )
    outcome = action.run(alert, context)
    if not outcome.done:
        return f"no evidence of step {step(at)}, which was asked for: {outcome.text}"
    return f"evidence of step {step(at)} is kept, as asked: {outcome.data.get('path', outcome.text)}"
