"""What is known of finished runs, in one small SQLite file beside them: a list of thousands must not read them all again.

Only commands that read write it, never a process that trains. It holds nothing that the records do not hold: deleting it
costs a second, and one that is damaged or cannot be written is passed over.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from healthcheck.record.folder import RUN_FILE
from healthcheck.record.runs import Run

FILE = ".runs.sqlite"
VERSION = 1
"""Rises with the form of what is kept; an index of another version is made again."""
REPORT = "report.json"
Summary = dict[str, Any]


def summaries(folder: Path, runs: Sequence[Run], summarise: Callable[[Run], Summary]) -> list[Summary]:
    """``summarise`` of each run, from the index where the run has ended and its files are still the same.

    :param folder: where the runs are, and the index.
    """
    stamps = {run.name: _stamp(run.folder) for run in runs}
    known = _known(folder)
    made: dict[str, Summary] = {}
    for run in runs:
        stamp, summary = known.get(run.name, ("", None))
        made[run.name] = summary if summary is not None and stamp and stamp == stamps[run.name] else summarise(run)
    ended = {name: stamp for name, stamp in stamps.items() if stamp}
    if {name: stamp for name, (stamp, _) in known.items()} != ended:
        _keep(folder, {name: (stamp, made[name]) for name, stamp in ended.items()})
    return [made[run.name] for run in runs]


def _stamp(run: Path) -> str:
    """Changes with the files that a summary is made of; empty for a run without a report, which may go on."""
    try:
        facts = [(run / name).stat() for name in (REPORT, RUN_FILE)]
    except OSError:
        return ""
    return " ".join(f"{fact.st_mtime_ns}/{fact.st_size}" for fact in facts)


def _known(folder: Path) -> dict[str, tuple[str, Summary]]:
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as base:
            if base.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                return {}
            rows = base.execute("SELECT name, stamp, summary FROM runs").fetchall()
            return {str(name): (str(stamp), json.loads(summary)) for name, stamp, summary in rows}
    except (sqlite3.Error, ValueError, TypeError):
        return {}


def _keep(folder: Path, ended: dict[str, tuple[str, Summary]]) -> None:
    path = folder / FILE
    for attempt in (1, 2):
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as base, base:
                if base.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                    base.execute("DROP TABLE IF EXISTS runs")
                base.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, stamp TEXT, summary TEXT)")
                base.execute("DELETE FROM runs")
                rows = [(name, stamp, json.dumps(summary)) for name, (stamp, summary) in ended.items()]
                base.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)
                base.execute(f"PRAGMA user_version = {VERSION}")
            path.chmod(0o600)
            return
        except sqlite3.DatabaseError as error:
            if attempt == 2 or isinstance(
                error, sqlite3.OperationalError
            ):  # locked or not to be written: the next one may
                return
            with contextlib.suppress(OSError):  # not a database: somebody else's, or damaged
                path.unlink()
        except (OSError, ValueError):
            return
