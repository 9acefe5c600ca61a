"""Write the Python stacks of all threads: the answer to "where does it stand?"."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert

_OURS = str(Path(__file__).resolve().parent.parent)
_LIBRARIES = tuple({p for k in ("stdlib", "platstdlib", "purelib", "platlib") if (p := sysconfig.get_path(k))})


class DumpStacks:
    """One file per rank and call with the stacks of all threads; names where the main thread stands.

    Works from the watchdog's thread while the main thread hangs. Kills nothing.
    """

    name = "dump_stacks"
    stage = "observe"
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        place = where_main_stands()
        words = f"main thread stands in {place}" if place else "main thread runs no Python code"
        if context.run_dir is None:
            return ActionOutcome.of(self.name, f"{words} (no record, so no file with all stacks)", place=place)
        try:
            path = _write(context.run_dir / "stacks", alert.rank)
        except OSError as error:
            return ActionOutcome.of(self.name, f"{words} (stacks not written: {error.strerror or error})", place=place)
        return ActionOutcome.of(self.name, f"{words}; all stacks: {path}", place=place, path=str(path))


def _write(folder: Path, rank: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    taken = [int(m[1]) for p in folder.iterdir() if (m := re.match(rf"(\d+)-rank{rank}\.txt$", p.name))]
    path = folder / f"{max(taken, default=0) + 1:04d}-rank{rank}.txt"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        main = threading.main_thread()
        file.write(f"process {os.getpid()}, rank {rank}; the main thread is 0x{main.ident or 0:016x}\n")
        for thread in threading.enumerate():
            file.write(f"0x{thread.ident or 0:016x} {thread.name}\n")
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def where_main_stands() -> str:
    """``train.py:31 in load (called by it: socket.py:705 in readinto)``; empty if no Python frame is there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    outside = [f for f in frames if not f.f_code.co_filename.startswith(_OURS)]
    if not outside:
        return ""
    inner = outside[0]
    own = next((f for f in outside if not _is_library(f.f_code.co_filename)), None)
    if own is None or own is inner:
        return _place(inner)
    return f"{_place(own)} (at {_place(inner)})"


def _is_library(filename: str) -> bool:
    return filename.startswith("<") or filename.startswith(_LIBRARIES) or "site-packages" in filename


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
