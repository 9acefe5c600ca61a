"""Runs that belong together: restarts of one job, detector states kept for them, and the last checkpoint known to be good."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import Alert
from healthcheck.core.redact import redact_argv, redact_text
from healthcheck.core.text import strict
from healthcheck.record.folder import RUN_FILE, list_runs, write_atomically
from healthcheck.record.runs import Run, load_run
from healthcheck.run.checkpoints import FileMark, Found

if TYPE_CHECKING:
    from healthcheck.rulelang.rule import Cause
    from healthcheck.run.session import Session

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
        if session is None or session.info.run_dir is None or not session.info.speaks or os.getpid() != session.pid:
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
    if report.get("verdict") != "stopped" or not stop.get("rule"):
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


# --------------------------------------------------------------------------------------------------
# Detector states at checkpoints, in the folder ``checkpoints`` of a run's record.
#
# ``index.json`` says which file of the user belongs to which ``step-N.json``; see docs/how-to/resume.md.
# Ranks other than 0 have the same in a folder ``rank-N`` of it.


FOLDER = "checkpoints"
INDEX = "index.json"
FORMAT, VERSION = "healthcheck-checkpoints", 1
RECENT, MOST = 50, 200
"""The newest files are always kept in mind (they may have been renamed), others while they lie where they were."""


class KeptStates:
    """This rank's states of one run, and those of earlier runs of the same target.

    :param run_dir: the folder of this run's record; of ranks that do not speak for all, their folder in it.
    """

    def __init__(self, session: Session, run_dir: Path) -> None:
        self._session = session
        self._rank = session.info.rank
        self._run = run_dir.absolute() if session.info.speaks else run_dir.absolute().parent
        self._folder = _place(self._run, self._rank)
        self._files: list[dict[str, Any]] = []
        self._chain: dict[str, Any] = {"root": self._run.name, "attempt": 1}
        self._trouble = False

    def keep(self, mark: FileMark | None, step: int, state: Mapping[str, Any], normal: Mapping[str, Any]) -> None:
        """Keep what the detectors knew when a file was written. A disk that is full is reported once.

        :param mark: None where another rank has written it.
        """
        if self._trouble:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not any(entry["step"] == step for entry in self._files):
                content = {"format": FORMAT, "version": VERSION, "step": step, "normal": dict(normal), "state": state}
                write_atomically(self._folder / _name(step), strict(content))
            self._files.append({**(asdict(mark) if mark is not None else {}), "step": step})
            self._prune()
            self._write_index()
        except OSError as error:
            self._trouble = True
            self._session.note(f"no detector state in {self._folder} ({error.strerror}); a resume starts fresh")

    def find(self, mark: FileMark) -> Found | None:
        """The newest run of this target that has written this file; for a file that was changed since, why not."""
        target = redact_text(self._session.info.target)
        changed = None
        for folder in reversed(list_runs(self._run.parent)):
            if folder.name == self._run.name:
                continue
            entries = [*_files(folder, 0), *(_files(folder, self._rank) if self._rank else ())]
            if not entries:
                continue
            run = load_run(folder)
            if run.target != target:
                continue
            for entry in reversed(entries):
                known = _mark(entry)
                if known is not None and known.same_content(mark):
                    return self._found(run, int(entry["step"]))
                if known is not None and known.path == mark.path and changed is None:
                    text = f"{mark.path} is not the file that {run.name} wrote (its content differs): rules start fresh"
                    changed = Found(run.name, 0, None, changed=text)
        return changed

    def kept(self, run: str, step: int) -> Found:
        """What this rank knew at that step of an earlier run; else what rank 0 knew: a rank that was not there."""
        return self._found(load_run(self._run.parent / run), step)

    def continues(self, found: Found) -> int:
        """Put it down in this run's record, also for the attempts to come; the script may be killed before it saves."""
        runs = self._run.parent
        root = (_read(runs / found.run / FOLDER / INDEX) or {}).get("root", found.run)
        others = [p for p in list_runs(runs) if p.name != self._run.name]
        attempt = 1 + len([p for p in others if (_read(p / FOLDER / INDEX) or {}).get("root") == root])
        self._chain = {"root": root, "attempt": attempt, "continues": found.run}
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._write_index()
            facts = _read(self._run / RUN_FILE)
            if facts is not None:
                facts.update(resumed_from=found.step, continues=found.run, attempt=attempt)
                write_atomically(self._run / RUN_FILE, facts)
        return attempt

    # -- inside -----------------------------------------------------------------------

    def _found(self, run: Run, step: int) -> Found:
        kept = _read(_place(run.folder, self._rank) / _name(step)) or _read(_place(run.folder, 0) / _name(step)) or {}
        readable = kept.get("format") == FORMAT and kept.get("version") == VERSION
        state = kept.get("state") if readable else None
        normal = kept.get("normal") if readable else None
        stop = stop_place(run.report) if run.report is not None else None
        ended = str((run.report or {}).get("exit_words") or run.status)
        if stop is not None:
            ended = f"stopped at {stop[1]:,} by {stop[0]}"
        elif ended == "ok":
            ended = f"ended at step {run.steps:,}"
        return Found(run.name, step, state, normal or {}, ended, stop)

    def _prune(self) -> None:
        old, new = self._files[:-RECENT], self._files[-RECENT:]
        self._files = ([entry for entry in old if _lies_there(entry)] + new)[-MOST:]
        names = {_name(entry["step"]) for entry in self._files}
        for path in self._folder.glob("step-*.json"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        content = {"format": FORMAT, "version": VERSION, **self._chain, "files": self._files}
        write_atomically(self._folder / INDEX, content)


def _name(step: int) -> str:
    return f"step-{step}.json"


def _place(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank}" if rank else run / FOLDER


def _files(run: Path, rank: int) -> list[dict[str, Any]]:
    index = _read(_place(run, rank) / INDEX) or {}
    files = index.get("files") if index.get("version") == VERSION else None
    return [entry for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []


def _mark(entry: Mapping[str, Any]) -> FileMark | None:
    try:
        return FileMark(**{name: entry[name] for name in ("path", "size", "digest")})
    except KeyError:
        return None


def _lies_there(entry: Mapping[str, Any]) -> bool:
    try:
        return os.stat(entry["path"]).st_size == int(entry["size"])
    except (OSError, KeyError):
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# --------------------------------------------------------------------------------------------------
# The last checkpoint that was written while everything was finite: the one to resume from.


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
        if any(judges_finiteness(rule) for rule in session.rules.causes):
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
        watched = {rule.id for rule in self._session.rules.causes if judges_finiteness(rule)}
        bad = [alert for alert in self._session.alerts if watched.intersection(alert.names)]
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


def judges_finiteness(rule: Cause) -> bool:
    """Whether an alert of this rule says that something was NaN or infinite."""
    return rule.condition.judges_nonfinite or rule.selector.metric.endswith(".nonfinite")


def covered(step: int, alerts: Iterable[Alert]) -> bool:
    """Whether one of the alerts was open at a step."""
    return any(a.fired_step <= step and (a.cleared_step is None or step < a.cleared_step) for a in alerts)
