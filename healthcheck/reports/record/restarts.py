"""The same stop again and again: tell the scheduler to give up.

A scheduler that restarts on failure runs into a deterministic fault all night. After three stops of
one target by the same rule at the same step the run's folder holds a file ``DO-NOT-RESTART``; the
job script tests for it (docs/how-to/schedulers.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.redact import redact_argv
from healthcheck.reports.record.rundir import list_runs
from healthcheck.reports.record.runs import Run, load_run

if TYPE_CHECKING:
    from healthcheck.session import Session

FILE = "DO-NOT-RESTART"
ENOUGH = 3


class RestartReport:
    """Counts equal stops and leaves the file. Comes before the record, so that ``report.json`` says it."""

    name = "restarts"

    def __init__(self) -> None:
        self._session: Session | None = None

    def start(self, session: Session) -> None:
        self._session = session

    def finish(self, report: dict[str, Any]) -> None:
        session = self._session
        if session is None or session.info.run_dir is None or session.info.rank or os.getpid() != session.pid:
            return
        if "::" in session.info.target:  # a test, by its node id: nobody restarts it but a person
            return
        here = stop_place(report)
        folder = session.info.run_dir
        if here is None or not folder.is_dir():
            return
        earlier = (load_run(path) for path in reversed(list_runs(folder.parent)) if path != folder)
        times = 1 + equal_stops(here, str(report["target"]), earlier, argv=redact_argv(session.info.argv))
        report["stop"]["times"] = times
        if times < ENOUGH:
            return
        rule, step = here
        text = (
            f"{report['target']} was stopped {times} times by {rule} at step {step:,}.\n"
            "The data or the code at this step is the cause, not luck: a restart will end here again.\n"
        )
        try:
            (folder / FILE).write_text(text, encoding="utf-8")
        except OSError as error:
            session.note(f"{FILE} could not be written to {folder} ({error.strerror})")
        else:
            report["stop"]["do_not_restart"] = True


def stop_place(report: Mapping[str, Any]) -> tuple[str, int] | None:
    """``(rule, step)`` of an executed stop by a rule: the step of the sample, not of the agreement."""
    stop = report.get("stop") or {}
    if report.get("exit_reason") != "stop" or not stop.get("rule"):
        return None
    fired = [a["fired_step"] for a in report.get("alerts", ()) if a.get("rule") == stop["rule"]]
    return str(stop["rule"]), int(fired[-1] if fired else stop["step"])


def equal_stops(here: tuple[str, int], target: str, earlier: Iterable[Run], *, argv: Sequence[str] = ()) -> int:
    """How many runs of this target in a row, newest first, ended in the same place.

    :param argv: its arguments; runs with others are other jobs. What only says where to resume does
        not count: a restart adds it.

    A run that got past the step ends the row: then the fault was luck, or was mended. One that was
    killed before it says nothing.
    """
    count = 0
    for run in earlier:
        if run.target != target or _job(run.facts.get("argv") or ()) != _job(argv):
            continue
        report = run.report
        if report is not None and stop_place(report) == here:
            count += 1
        elif run.steps > here[1]:
            break
    return count


def _job(argv: Sequence[str]) -> list[str]:
    """The arguments that tell jobs apart."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = False
        if word.startswith("-") and any(part in word.lower() for part in ("resume", "checkpoint", "ckpt", "restart")):
            skip = "=" not in word
        else:
            kept.append(word)
    return kept
