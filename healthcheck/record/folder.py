"""The folder of one run: where it lies, what it holds, and the facts of its start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.digest import sha256
from healthcheck.core.redact import redact_argv, redact_text
from healthcheck.core.version import VERSION

if TYPE_CHECKING:
    from healthcheck.core.runinfo import RunInfo
    from healthcheck.run.session import Session

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LAUNCH = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
_NODES = ("GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK")
WAIT_SECONDS, STAND_IN_SECONDS = 5.0, 10.0
"""How long another rank waits for rank 0's record, and how long until it keeps it in its place: on a busy machine ranks begin
seconds apart."""
FRESH_SECONDS = 120.0
"""A pointer older than this belongs to an earlier launch that used the same port."""


def process_rank() -> int:
    """This process's rank as its launcher says; 0 without a launcher."""
    return _first(_RANKS, 0)


def job_size() -> int:
    """Number of processes of this launch; 1 without a launcher."""
    return max(1, _first(_SIZES, 1))


def _first(names: tuple[str, ...], default: int) -> int:
    if _outside_a_slurm_step():
        names = tuple(name for name in names if not name.startswith("SLURM"))
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default


def _outside_a_slurm_step() -> bool:
    """An interactive allocation sets SLURM_NTASKS in the shell although one process was started."""
    return "SLURM_STEP_ID" not in os.environ


def key() -> str | None:
    """A name for this launch that all its ranks compute alike; None without a launcher."""
    parts = [f"{name}={os.environ[name]}" for name in _LAUNCH if os.environ.get(name)]
    return sha256("|".join(parts).encode()).hexdigest()[:16] if parts else None


def _pointer(folder: Path) -> Path | None:
    name = key()
    return folder / f".launch-{name}.json" if name is not None else None


def announce(folder: Path, run: str, rank: int = 0, *, kept: bool = False) -> None:
    """Leave the name of the folder that this rank has made for the other ranks. Does nothing in a world of one.

    :param kept: made for rank 0, which is on its way.
    """
    pointer = _pointer(folder)
    if pointer is None or job_size() == 1:
        return
    with contextlib.suppress(OSError):
        temporary = folder / f".{run}.launch"
        facts = {"run": run, "host": socket.gethostname(), "parent": os.getppid(), "rank": rank, "kept": kept}
        temporary.write_text(json.dumps(facts))
        os.replace(temporary, pointer)


@dataclass(frozen=True, slots=True)
class LaunchFolder:
    """The folder that one rank of a launch has made for all."""

    path: Path
    kept: bool
    """Whether it was made for rank 0, which was still to come."""


def folder_of_launch(folder: Path, *, wait: float, by_rank_zero: bool = True) -> LaunchFolder | None:
    """The folder that one rank of this launch has made for all, or None if it does not show up in time.

    :param wait: seconds.
    :param by_rank_zero: whether a folder of rank 0 will do: it looks itself for those of ranks that stand in for it, and
        for one that was made for it.
    """
    pointer = _pointer(folder)
    if pointer is None:
        return None
    deadline = time.monotonic() + wait
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            fresh = time.time() - pointer.stat().st_mtime < FRESH_SECONDS
            written = json.loads(pointer.read_text())
            same = written["host"] != socket.gethostname() or written["parent"] == os.getppid()
            made = folder / str(written["run"])
            stood_in = bool(written["rank"])
            goes_on = made.is_dir() and not (stood_in and (made / "report.json").exists())  # else of an earlier launch
            kept = bool(written.get("kept"))
            meant = by_rank_zero or stood_in or (kept and not (made / RUN_FILE).exists())
            if fresh and same and goes_on and meant:
                return LaunchFolder(made, kept)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


def _may_stand_in() -> bool:
    """Whether rank 0 would be seen here: on another node the record may lie on a disk that is not shared."""
    return key() is not None and not any(os.environ.get(name, "0") not in ("", "0") for name in _NODES)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Of the ranks of this machine that find no record only one makes it."""
    try:
        import fcntl

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / f".launch-{key()}.lock", "w")  # noqa: SIM115
    except (ImportError, OSError):
        yield
        return
    with lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    with contextlib.suppress(OSError):
        os.unlink(lock.name)


# --------------------------------------------------------------------------------------------------
# What ``run.json`` says of a run: enough to find and compare it, nothing secret.


RUN_FORMAT = "healthcheck-run"
RUN_VERSION = 2
"""1: all samples plain in one file. 2: closed parts of them compressed beside it. Both are read."""

_JOB = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "LOCAL_RANK",
)
"""Variables of launchers that are recorded; the environment as a whole never is."""


def run_facts(session: Session, wall: float) -> dict[str, Any]:
    """The content of ``run.json``. ``wall`` is the time of the start in seconds since 1970."""
    info = session.info
    facts: dict[str, Any] = {
        "format": RUN_FORMAT,
        "version": RUN_VERSION,
        "name": info.name or (info.run_dir.name if info.run_dir is not None else ""),
        "target": redact_text(info.target),
        "argv": redact_argv(info.argv),
        "started": datetime.fromtimestamp(wall, timezone.utc).isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": info.rank,
        "world_size": info.world_size,
        "resumed_from": info.resumed_from,
        "mode": "observe" if session.observing else "act",
        "rules_source": session.rules.source,
        "profile": session.rules.profile or None,
        "versions": {
            "healthcheck": VERSION,
            "python": platform.python_version(),
            "torch": _torch_version(),
            "platform": platform.platform(),
        },
        "job": {name: os.environ[name] for name in _JOB if os.environ.get(name)},
    }
    return {key: value for key, value in facts.items() if value is not None}


def _torch_version() -> str | None:
    """Without importing torch: the script may not have done so yet."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(getattr(torch, "VERSION", ""))
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------
# The folder of one run's record: its place, its name, ``latest``, and what is pruned.
#
# ``HEALTHCHECK_RUNS``, else ``healthcheck-runs/`` in the working directory, else a temporary folder.


RUNS_VARIABLE = "HEALTHCHECK_RUNS"
RUNS_FOLDER = "healthcheck-runs"
LATEST = "latest"
LATEST_FILE = "latest.txt"
"""Holds the name of the newest run where symbolic links do not work."""
RUN_FILE = "run.json"


def runs_folder(settings: Mapping[str, Any] | None = None) -> Path:
    """Where records go; need not exist yet: ``HEALTHCHECK_RUNS``, else the setting ``runs``, else here."""
    named = os.environ.get(RUNS_VARIABLE) or (settings or {}).get("runs")
    return Path(str(named)).expanduser() if named else Path(RUNS_FOLDER)


def open_run_dir(
    target: str, settings: Mapping[str, Any], notes: list[str] | None = None, *, rank_zero_comes: bool = False
) -> tuple[Path | None, bool | None]:
    """Make the folder of a new run: ``(folder, voice)``. The folder is None if nothing can be written anywhere.

    Rank 0 makes it; other ranks of the same launch get the path of their sub-folder ``rank-N``,
    which they make when they have something to write. If rank 0 makes none, the first rank that has waited for it does, and
    is the one that speaks (``RunInfo.voice``); a rank 0 that comes later is then one of the others.

    :param settings: ``keep``: how many runs stay in the folder (default: all).
    :param notes: a sentence is added here when the record lies elsewhere than expected, or is that of another rank.
    :param rank_zero_comes: the process of rank 0 is known to be watched once it trains: whoever comes first makes the folder
        for it and goes on, for this may be the first step of a training, which must not wait.
    """
    notes = notes if notes is not None else []
    named = runs_folder(settings)
    wanted = named.absolute()  # the script may change its directory
    rank = process_rank()
    # So that the lowest rank that is watched is usually the first to have waited enough.
    alone = STAND_IN_SECONDS + min(2.0, 0.5 * (rank - 1)) if _may_stand_in() else WAIT_SECONDS
    if rank_zero_comes and job_size() > 1:
        with _one_at_a_time(wanted):
            return _with_rank_zero(target, named, wanted, settings, notes, rank)
    waits = alone if rank else 0.0
    found = folder_of_launch(wanted, wait=waits, by_rank_zero=rank > 0) if job_size() > 1 else None
    if found is not None:
        return found.path / f"rank-{rank}", False
    if not rank:
        return _new_run_dir(target, named, wanted, settings, notes), None
    if not _may_stand_in():
        return None, None
    with _one_at_a_time(wanted):
        found = folder_of_launch(wanted, wait=0.0)
        if found is not None:
            return found.path / f"rank-{rank}", False
        notes.append(f"rank 0 has begun no record in {STAND_IN_SECONDS:.0f} s (is it watched?): rank {rank} keeps it")
        return _new_run_dir(target, named, wanted, settings, notes, rank), True


def _with_rank_zero(
    target: str, named: Path, wanted: Path, settings: Mapping[str, Any], notes: list[str], rank: int
) -> tuple[Path | None, bool | None]:
    """The folder of a launch whose rank 0 comes sooner or later: nobody waits for it."""
    found = folder_of_launch(wanted, wait=0.0, by_rank_zero=rank > 0)
    if found is not None and not rank and found.kept:
        announce(wanted, found.path.name)  # it is here
        return found.path, None
    if found is not None:
        return found.path / f"rank-{rank}", False
    made = _new_run_dir(target, named, wanted, settings, notes, kept=rank > 0)
    return (made / f"rank-{rank}" if rank and made is not None else made), (False if rank else None)


def _new_run_dir(
    target: str,
    named: Path,
    wanted: Path,
    settings: Mapping[str, Any],
    notes: list[str],
    rank: int = 0,
    *,
    kept: bool = False,
) -> Path | None:
    try:
        made = _make(wanted, target)
    except OSError as error:
        try:
            wanted = Path(tempfile.mkdtemp(prefix="healthcheck-runs-"))
            made = _make(wanted, target)
        except OSError:
            notes.append(f"no record: nothing can be written to {named} or a temporary folder ({error.strerror})")
            return None
        notes.append(f"record in {made}, because {named} cannot be written ({error.strerror})")
    _point_latest(wanted, made.name)
    announce(wanted, made.name, rank, kept=kept)
    keep = settings.get("keep")
    if isinstance(keep, int) and not isinstance(keep, bool) and keep > 0:
        prune(wanted, keep - 1)
    return made


def _make(folder: Path, target: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(folder / ".gitignore", "x", encoding="utf-8") as ignore:
        ignore.write("*\n")  # never through a link that points nowhere: who knows what it would make
    base = f"{time.strftime('%m%d-%H%M')}-{_slug(target)}"
    for n in range(1, 10_000):
        path = folder / (base if n == 1 else f"{base}-{n}")
        try:
            path.mkdir(mode=0o700)  # atomic: of two simultaneous starts one takes the next name
        except FileExistsError:
            continue
        (path / ".gitignore").write_text("*\n", encoding="utf-8")
        return path
    raise OSError(28, "ten thousand runs of this name in one minute", str(folder))


def _slug(target: str) -> str:
    """``train`` for ``/home/me/train.py`` and for ``-m pkg.train``: safe in every file system."""
    word = target.split()[-1] if target.split() else "run"
    name = re.split(r"[/\\]", word)[-1].removesuffix(".py")
    if "/" not in word and "::" not in word and not word.endswith(".py"):
        name = name.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "run"


def _point_latest(folder: Path, name: str) -> None:
    """Point ``latest`` at a run: a symbolic link and a text file, each replaced in one step."""
    unique = f".{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        text = folder / f"{unique}.txt"
        text.write_text(name + "\n", encoding="utf-8")
        os.replace(text, folder / LATEST_FILE)
    with contextlib.suppress(OSError, NotImplementedError):
        link = folder / f"{unique}.link"
        link.symlink_to(name, target_is_directory=True)
        try:
            os.replace(link, folder / LATEST)
        except OSError:
            link.unlink()


def latest_name(folder: Path) -> str | None:
    """Name of the newest run of a folder, from the text file, the link, or the folders' times."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST_FILE).read_text(encoding="utf-8").strip()
        if name and (folder / name / RUN_FILE).is_file():
            return name
    with contextlib.suppress(OSError):
        name = os.readlink(folder / LATEST)
        if (folder / name / RUN_FILE).is_file():
            return name
    runs = list_runs(folder)
    return runs[-1].name if runs else None


def folder_of_rank(info: RunInfo) -> Path | None:
    """Where this rank keeps its record: that of the run if it speaks for all, else a folder of its own below it."""
    folder: Path | None = info.run_dir
    if folder is None or info.speaks or folder.name.startswith("rank-"):
        return folder
    return folder / f"rank-{info.rank}"


def latest_shown(run_dir: Path) -> str:
    """How the console names a run's folder: relative to the working directory where it lies below."""
    name: Path = run_dir
    with contextlib.suppress(OSError):
        link = run_dir.parent / LATEST
        if link.is_symlink() and os.readlink(link) == run_dir.name:
            name = link
    with contextlib.suppress(ValueError, OSError):
        return name.absolute().relative_to(Path.cwd()).as_posix()
    return str(name)


def list_runs(folder: Path) -> list[Path]:
    """Folders of runs, oldest first."""

    def began(path: Path) -> tuple[float, str]:
        try:
            return (path / RUN_FILE).stat().st_mtime, path.name
        except OSError:
            return 0.0, path.name

    try:
        found = [p for p in folder.iterdir() if not p.is_symlink() and (p / RUN_FILE).is_file()]
    except OSError:
        return []
    return sorted(found, key=began)


def prune(folder: Path, keep: int) -> list[str]:
    """Delete the oldest finished runs until ``keep`` are left; returns their names."""
    runs = list_runs(folder)
    return [path.name for path in runs[: max(0, len(runs) - keep)] if is_over(path) and delete(path)]


def is_over(run: Path) -> bool:
    """Whether a run has a report, or nothing was written for a day: one without a report may still be going on."""
    try:
        idle = time.time() - max(p.stat().st_mtime for p in run.iterdir())
    except (OSError, ValueError):
        return False
    return (run / "report.json").is_file() or idle > 86_400


def delete(run: Path) -> bool:
    """Delete the folder of a run, and ``latest`` if it points there; False where that is not allowed."""
    try:
        shutil.rmtree(run)
    except OSError:
        return False
    link = run.parent / LATEST
    with contextlib.suppress(OSError):
        if link.is_symlink() and os.readlink(link) == run.name:
            left = list_runs(run.parent)
            link.unlink()
            if left:
                _point_latest(run.parent, left[-1].name)
    return True


def write_atomically(path: Path, value: Any) -> None:
    """Write strict JSON so that a reader sees the old file or the new one, never a half."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=_for_the_owner) as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_once(path: Path, data: bytes, *, siblings: int = 5) -> None:
    """Write a file that never changes again; where one of the last runs has the same, both names are one file on disk."""
    with contextlib.suppress(OSError):
        others = sorted(
            (entry.name for entry in os.scandir(path.parent.parent) if entry.name[:1].isdigit()), reverse=True
        )
        for name in [name for name in others if name != path.parent.name][:siblings]:
            other = path.parent.parent / name / path.name
            with contextlib.suppress(OSError):
                if other.stat().st_size == len(data) and other.read_bytes() == data:
                    os.link(other, path)
                    return
    append(path, data)


def _for_the_owner(path: str, flags: int) -> int:
    """An ``opener`` for files that nobody else may read, wherever the folder is moved to."""
    return os.open(path, flags, 0o600)


def append(path: Path, data: bytes) -> None:
    """Append bytes with one open and no buffer: a forked child inherits nothing that it could write twice."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        while data:
            data = data[os.write(number, data) :]
    finally:
        os.close(number)
