"""The folder of one run's record: its place, its name, ``latest``, and what is pruned.

``HEALTHCHECK_RUNS``, else ``healthcheck-runs/`` in the working directory, else a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck.reports.record import launch

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


def open_run_dir(target: str, settings: Mapping[str, Any], notes: list[str] | None = None) -> Path | None:
    """Make the folder of a new run; None if nothing can be written anywhere.

    Rank 0 makes it; other ranks of the same launch get the path of their sub-folder ``rank-N``,
    which they make when they have something to write.

    :param settings: ``keep``: how many runs stay in the folder (default: all).
    :param notes: a sentence is added here when the record lies elsewhere than expected.
    """
    notes = notes if notes is not None else []
    named = runs_folder(settings)
    wanted = named.absolute()  # the script may change its directory
    rank = launch.rank()
    if rank:
        found = launch.folder_of_rank_zero(wanted, rank)
        return found / f"rank-{rank}" if found is not None else None
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
    launch.announce(wanted, made.name)
    keep = settings.get("keep")
    if isinstance(keep, int) and not isinstance(keep, bool) and keep > 0:
        prune(wanted, keep - 1)
    return made


def _make(folder: Path, target: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
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


def _for_the_owner(path: str, flags: int) -> int:
    """An ``opener`` for files that nobody else may read, wherever the folder is moved to."""
    return os.open(path, flags, 0o600)
