"""How the ranks of one launch find the folder that rank 0 made, without a collective.

Rank 0 leaves its folder's name under a key of the launch; others look there. Never waits long:
a rank that finds nothing keeps its alerts in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from pathlib import Path

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
WAIT_SECONDS = 5.0
FRESH_SECONDS = 120.0
"""A pointer older than this belongs to an earlier launch that used the same port."""


def rank() -> int:
    """This process's rank as its launcher says; 0 without a launcher."""
    return _first(_RANKS, 0)


def world_size() -> int:
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
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16] if parts else None


def _pointer(folder: Path) -> Path | None:
    name = key()
    return folder / f".launch-{name}.json" if name is not None else None


def announce(folder: Path, run: str) -> None:
    """Leave the name of rank 0's folder for the other ranks. Does nothing in a world of one."""
    pointer = _pointer(folder)
    if pointer is None or world_size() == 1:
        return
    with contextlib.suppress(OSError):
        temporary = folder / f".{run}.launch"
        temporary.write_text(json.dumps({"run": run, "host": socket.gethostname(), "parent": os.getppid()}))
        os.replace(temporary, pointer)


def folder_of_rank_zero(folder: Path, rank: int, wait: float = WAIT_SECONDS) -> Path | None:
    """The folder that rank 0 of this launch made, or None if it does not show up in time."""
    pointer = _pointer(folder)
    if pointer is None:
        return None
    deadline = time.monotonic() + wait
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            fresh = time.time() - pointer.stat().st_mtime < FRESH_SECONDS
            told = json.loads(pointer.read_text())
            same = told["host"] != socket.gethostname() or told["parent"] == os.getppid()
            if fresh and same and (folder / told["run"]).is_dir():
                return folder / str(told["run"])
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)
