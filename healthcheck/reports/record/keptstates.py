"""Detector states at checkpoints, in the folder ``checkpoints`` of a run's record.

``index.json`` says which file of the user belongs to which ``step-N.json``; see docs/how-to/resume.md.
Ranks other than 0 have the same in a folder ``rank-N`` of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.redact import redact_text
from healthcheck.reports.record.restarts import stop_place
from healthcheck.reports.record.rundir import RUN_FILE, list_runs, write_atomically
from healthcheck.reports.record.runs import Run, load_run
from healthcheck.reports.strict import strict
from healthcheck.trainers.resume.continuation import FileMark, Found

if TYPE_CHECKING:
    from healthcheck.session import Session

FOLDER = "checkpoints"
INDEX = "index.json"
FORMAT, VERSION = "healthcheck-checkpoints", 1
RECENT, MOST = 50, 200
"""The newest files are always kept in mind (they may have been renamed), others while they lie where they were."""


class KeptStates:
    """This rank's states of one run, and those of earlier runs of the same target.

    :param run_dir: the folder of this run's record; of ranks other than 0, their folder in it.
    """

    def __init__(self, session: Session, run_dir: Path) -> None:
        self._session = session
        self._rank = session.info.rank
        self._run = run_dir.absolute() if not self._rank else run_dir.absolute().parent
        self._folder = _place(self._run, self._rank)
        self._files: list[dict[str, Any]] = []
        self._chain: dict[str, Any] = {"root": self._run.name, "attempt": 1}
        self._trouble = False

    def keep(self, mark: FileMark | None, step: int, state: Mapping[str, Any], normal: Mapping[str, Any]) -> None:
        """Keep what the detectors knew when a file was written. A disk that is full is told once.

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
