"""Records read back: find a run by name, ``latest`` or path; its facts, alerts, samples, report. Torch-free."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from healthcheck.core.errors import HealthCheckError, UsageError
from healthcheck.core.samples import series_name
from healthcheck.core.text import suggest
from healthcheck.record import segments
from healthcheck.record.folder import (
    LATEST,
    RUN_FILE,
    RUN_VERSION,
    RUNS_VARIABLE,
    latest_name,
    list_runs,
    runs_folder,
)
from healthcheck.record.lines import Batch, RecordedSamples, read_samples
from healthcheck.rulelang.rule import RuleSet
from healthcheck.rulelang.sources import is_pack_name


@dataclass
class Run:
    """One recorded run. Files are read when they are asked for; damaged ones count as absent."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    """``run.json``; empty if it is damaged."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def shown(self) -> str:
        """The folder as people type it: relative to the working directory where it lies below."""
        try:
            return self.folder.absolute().relative_to(Path.cwd()).as_posix()
        except ValueError:
            return str(self.folder)

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """``report.json``, or None while the run goes on or if it was killed."""
        return _read_json(self.folder / "report.json")

    @cached_property
    def alerts(self) -> list[dict[str, Any]]:
        """All alerts in the order of their numbers, each in its last known state."""
        if self.report is not None:
            return list(self.report.get("alerts", []))
        latest: dict[int, dict[str, Any]] = {}
        for line in _lines(self.folder / "alerts.jsonl"):
            try:
                entry = json.loads(line)
                if not entry.get("repeat"):
                    latest[int(entry["number"])] = entry
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # the torn last line of a killed run
        return [latest[number] for number in sorted(latest)]

    @cached_property
    def samples(self) -> RecordedSamples:
        """The samples; empty if none were recorded."""
        try:
            return read_samples(segments.sample_lines(self.folder))
        except OSError:
            return RecordedSamples([])

    @property
    def rules_file(self) -> Path:
        """The rules that judged this run, as one YAML file."""
        return self.folder / "rules.yaml"

    @cached_property
    def other_ranks(self) -> list[Run]:
        """The records of other ranks of this run that had alerts, by rank."""
        found = [path for path in self.folder.glob("rank-*") if (path / RUN_FILE).is_file()]
        runs = sorted(map(load_run, found), key=lambda run: (len(run.name), run.name))
        return [run for run in runs if run.alerts]

    @property
    def target(self) -> str:
        return str(self.facts.get("target") or (self.report or {}).get("target") or "?")

    @property
    def began(self) -> float:
        """When it began, in seconds since 1970."""
        try:
            return datetime.fromisoformat(str(self.facts["started"])).timestamp()
        except (KeyError, ValueError):
            return (self.folder / RUN_FILE).stat().st_mtime

    @property
    def steps(self) -> int:
        """Steps of the run; of a run without a report the last step that was recorded."""
        if self.report is not None:
            return int(self.report.get("steps", 0))
        try:
            newest = read_samples(segments.newest_lines(self.folder, TAIL))
        except OSError:
            return 0
        return max((batch.at for batch in newest.batches), default=0)

    @property
    def status(self) -> str:
        """``ok``, ``warned``, ``failed``, ``not judged``; ``running`` or ``killed`` without a report."""
        alive = _alive(self.facts.get("pid"))  # before the report: a run that ends in between has left one
        if self.report is not None:
            return str(self.report.get("verdict", "?"))
        if self.facts.get("host") != socket.gethostname():
            return "unfinished"
        return "running" if alive else "killed"


def find_run(named: str | None = None) -> Run:
    """The run that a user means: a name or its beginning, ``latest`` (also None), or a path.

    Raises ``UsageError`` that says where it looked and suggests a name.
    """
    folder = reading_folder()
    if named is None or named == LATEST:
        name = latest_name(folder)
        if name is None:
            raise UsageError(
                f"no runs in {folder} yet; `healthcheck run train.py` makes one (HEALTHCHECK_RUNS names another folder)"
            )
        return load_run(folder / name)
    path = Path(named).expanduser()
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        path = path.parent
    if path.name == LATEST and not path.exists():
        name = latest_name(path.parent)  # a file system without symbolic links
        path = path.parent / name if name is not None else path
    if (path / RUN_FILE).is_file():
        return load_run(path.resolve())
    if path.is_dir():
        name = latest_name(path)
        if name is not None:
            return load_run(path / name)
    names = [run.name for run in list_runs(folder)]
    if named in names:
        return load_run(folder / named)
    begins = [name for name in names if name.startswith(named)]
    if len(begins) == 1:
        return load_run(folder / begins[0])
    if begins:
        raise UsageError(f'"{named}" begins the names of {len(begins)} runs: {", ".join(begins[-5:])}; type more of it')
    hint = suggest(named, names) or (f"newest: {', '.join(names[-3:])}" if names else "there are none yet")
    raise UsageError(f'no run "{named}" in {folder}; {hint}')


def latest_run() -> Run | None:
    """The latest run of this project, if there is one."""
    folder = reading_folder()
    name = latest_name(folder)
    return load_run(folder / name) if name is not None else None


def reading_folder() -> Path:
    """Where the runs of this project are: ``HEALTHCHECK_RUNS``, else the setting ``runs`` of the file found here.

    A broken rule file must not keep anybody from reading runs: then the default holds.
    """
    if os.environ.get(RUNS_VARIABLE):
        return runs_folder()
    from healthcheck.rulelang.discover import discover
    from healthcheck.rulelang.loader import load_file

    try:
        found = discover()
    except HealthCheckError:
        return runs_folder()
    settings: dict[str, Any] = dict(found.settings)
    if found.path is not None and found.path.suffix in (".yaml", ".yml"):
        data = load_file(found.path).data
        written = data.get("settings") if isinstance(data, dict) else None
        settings.update(written if isinstance(written, dict) else {})
    return runs_folder({"runs": settings.get("runs")})


def all_runs(folder: Path | None = None) -> list[Run]:
    """Every run of a folder (default: where records go), oldest first."""
    runs = []
    for path in list_runs(folder if folder is not None else reading_folder()):
        with contextlib.suppress(UsageError):  # of a newer version: said by the command that names it
            runs.append(load_run(path))
    return runs


def load_run(folder: Path) -> Run:
    """The record in a folder that is known to be one.

    Raises ``UsageError`` for one that a newer version wrote: a part of it would be taken for all.
    """
    facts = _read_json(folder / RUN_FILE) or {}
    version = facts.get("version", 1)
    if isinstance(version, int) and version > RUN_VERSION:
        raise UsageError(
            f"{folder} was recorded by a newer healthcheck (record version {version}, this one reads up to {RUN_VERSION}); "
            "upgrade: pip install -U torch-healthcheck"
        )
    return Run(folder, facts)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0 or os.name != "posix":
        return False  # on Windows signal 0 would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# --------------------------------------------------------------------------------------------------
# Rules of packs that the last run here was not judged by: what an upgrade of a pack has brought.


LOOKED_AT = 20
"""Runs that are looked at, newest first, for one with the same source of rules."""


def new_rules(rules: RuleSet, folder: Path, *, but: Path | None = None) -> list[str]:
    """Ids of pack rules that are judged now and were not known to the last run from the same rules.

    :param folder: where the records are.
    :param but: the folder of the run that is about to begin.

    Empty where there is no such run: on a first run nothing is new.
    """
    try:
        # By name, which begins with the time: a look at each folder would be felt where there are thousands.
        names = sorted((entry.name for entry in os.scandir(folder) if entry.name[:1].isdigit()), reverse=True)
    except OSError:
        return []
    for name in [name for name in names if but is None or name != but.name][:LOOKED_AT]:
        report = load_run(folder / name).report or {}
        if report.get("rules_source") != rules.source or report.get("profile", "") != (rules.profile or ""):
            continue
        known = {*report.get("rules", ()), *report.get("off", ())}
        return [rule.id for rule in rules.rules if rule.id not in known and is_pack_name(rule.origin.path)]
    return []


# --------------------------------------------------------------------------------------------------
# The record of a run that goes on, read as it grows: newest values, what is usual, the pace.


KEPT = 200
"""Values per series from which the usual one is taken."""
TAIL = 2**21
"""Bytes of an old record that are read at first: a long run is followed from where it is."""


@dataclass(slots=True)
class Followed:
    """One series: its newest values, oldest first."""

    metric: str
    values: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def last(self) -> float:
        return self.values[-1][1]

    @property
    def usual(self) -> float | None:
        """Median of the finite values that are kept."""
        finite = [value for _, value in self.values if math.isfinite(value)]
        return median(finite) if finite else None


class Follower:
    """Reads what has come since the last look. Once the tail of the record is closed, it goes on with the next one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.series: dict[str, Followed] = {}
        self.step = 0
        self._at = 0
        self._file = 0
        """Number of the file in which :attr:`_at` counts; 0 before the first look."""

    @property
    def silent(self) -> float:
        """Seconds since the record was last written to."""
        times = []
        for name in (segments.TAIL, segments.PACKED):
            with contextlib.suppress(OSError):
                times.append((self.run.folder / name).stat().st_mtime)
        return max(0.0, time.time() - max(times)) if times else 0.0

    def look(self) -> None:
        """Take in the lines that are complete by now."""
        older: list[bytes] = []
        try:
            with open(self.run.folder / segments.TAIL, "rb") as file:
                facts = os.fstat(file.fileno())
                size, anew = facts.st_size, not self._file
                if anew and size <= TAIL:
                    older = segments.newest_lines(self.run.folder, TAIL, tail=False)
                start = max(0, size - TAIL) if anew else self._at
                if (not anew and facts.st_ino != self._file) or size < self._at:
                    start = 0
                self._file = facts.st_ino or 1
                file.seek(start)
                new = file.read(size - start)
        except OSError:
            return
        whole = new.rfind(b"\n") + 1
        begin = new.find(b"\n") + 1 if anew and start else 0
        self._at = start + whole
        batches = list(read_samples([*older, *new[begin:whole].splitlines()]).batches)
        if start == 0 and batches and batches[0].at <= self.step:  # lines that are known: written again
            self.series.clear()
        self._take(batches)

    def _take(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.step = max(self.step, batch.at)
            for sample in batch.samples:
                if any(key == "parameter" for key, _ in sample.labels):
                    continue
                name = series_name(sample.metric, sample.labels)
                self.series.setdefault(name, Followed(sample.metric)).values.append((sample.step, sample.value))


# --------------------------------------------------------------------------------------------------
# What is known of finished runs, in one small SQLite file beside them: a list of thousands must not read them all again.
#
# Only commands that read write it, never a process that trains. It holds nothing that the records do not hold: deleting it
# costs a second, and one that is damaged or cannot be written is passed over.


INDEX = ".runs.sqlite"
INDEX_VERSION = 1
"""Rises with the form of what is kept; an index of another version is made again."""
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
        facts = [(run / name).stat() for name in ("report.json", RUN_FILE)]
    except OSError:
        return ""
    return " ".join(f"{fact.st_mtime_ns}/{fact.st_size}" for fact in facts)


def _known(folder: Path) -> dict[str, tuple[str, Summary]]:
    path = folder / INDEX
    if not path.is_file():
        return {}
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as base:
            if base.execute("PRAGMA user_version").fetchone()[0] != INDEX_VERSION:
                return {}
            rows = base.execute("SELECT name, stamp, summary FROM runs").fetchall()
            return {str(name): (str(stamp), json.loads(summary)) for name, stamp, summary in rows}
    except (sqlite3.Error, ValueError, TypeError):
        return {}


def _keep(folder: Path, ended: dict[str, tuple[str, Summary]]) -> None:
    import sqlite3

    path = folder / INDEX
    for attempt in (1, 2):
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=1.0)) as base, base:
                if base.execute("PRAGMA user_version").fetchone()[0] != INDEX_VERSION:
                    base.execute("DROP TABLE IF EXISTS runs")
                base.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, stamp TEXT, summary TEXT)")
                base.execute("DELETE FROM runs")
                rows = [(name, stamp, json.dumps(summary)) for name, (stamp, summary) in ended.items()]
                base.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)
                base.execute(f"PRAGMA user_version = {INDEX_VERSION}")
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
