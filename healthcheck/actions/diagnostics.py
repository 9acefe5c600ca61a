"""Actions that write down what the process is doing: stacks of all threads, the CUDA allocator, a profile of a few steps."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.protocols import ActionContext
from healthcheck.core.runinfo import RunFacts
from healthcheck.core.text import size_text

if TYPE_CHECKING:
    from healthcheck.core.events import Event
    from healthcheck.run.session import Session

_OURS = str(Path(__file__).resolve().parent.parent)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is nobody's own."""
    import sysconfig  # reads how Python was built, for a list that only a run that hangs needs

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({path for name in names if (path := sysconfig.get_path(name))})


class DumpStacks:
    """One file per rank and call with the stacks of all threads; names where the main thread stands.

    Works from the watchdog's thread while the main thread hangs. Kills nothing.
    """

    name = "dump_stacks"
    stage = "observe"
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        place = where_main_stands()
        words = f"main thread is in {place}" if place else "main thread runs no Python code"
        if context.run_dir is None:
            return ActionOutcome.of(self.name, f"{words} (no record, so no file with all stacks)", place=place)
        try:
            path = _write_stacks(context.run_dir / "stacks", alert.rank)
        except OSError as error:
            return ActionOutcome.of(self.name, f"{words} (stacks not written: {error.strerror or error})", place=place)
        return ActionOutcome.of(self.name, f"{words}; all stacks: {path}", place=place, path=str(path))


class AskRanks:
    """Says which rank a job waits for that hangs, where that is known: which one did not enter a collective, is in another one, or
    does not answer. Reads what the watchdogs of all ranks have written down; waits for nobody.
    """

    name = "ask_ranks"
    stage = "observe"
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def __init__(self) -> None:
        self._facts: RunFacts | None = None

    def listen(self, session: Any) -> None:
        """Keep what the session knows of other ranks."""
        self._facts = session.facts

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        ranks = self._facts.ranks if self._facts is not None else None
        found = ranks.hang() if ranks is not None else {}
        for facts in (alert.facts, *(finding.facts for finding in alert.findings)):
            facts.update(found)
        if not found:
            return ActionOutcome(self.name, False, "")
        return ActionOutcome.of(self.name, str(found["cause"]), **found)


def _write_stacks(folder: Path, rank: int) -> Path:
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
    return filename.startswith(("<", *_libraries())) or "site-packages" in filename


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


# --------------------------------------------------------------------------------------------------
# What the CUDA allocator holds, as JSON and as its own summary table.


MAX_BYTES = 64 * 2**20


class MemorySnapshot:
    """Segments and blocks of the CUDA allocator, in ``memory/``. On other devices it says so."""

    name = "memory_snapshot"
    stage = "observe"
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        import torch

        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return ActionOutcome.nothing_done(self.name, "only the CUDA allocator can give one")
        if context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "this run keeps no record")
        content = json.dumps(torch.cuda.memory.memory_snapshot(), default=str)
        stem = context.run_dir / "memory" / f"{alert.number:03d}-rank{alert.rank}"
        try:
            stem.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_privately(stem.with_suffix(".txt"), torch.cuda.memory_summary())
            if len(content) > MAX_BYTES:
                return ActionOutcome.of(
                    self.name, f"memory summary: {stem}.txt (the snapshot of {size_text(len(content))} is too large)"
                )
            _write_privately(stem.with_suffix(".json"), content)
        except OSError as error:
            return ActionOutcome.nothing_done(self.name, f"{error.strerror or error} ({stem.parent})")
        return ActionOutcome.of(self.name, f"memory snapshot: {stem}.json", path=f"{stem}.json")


def _write_privately(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


# --------------------------------------------------------------------------------------------------
# Record a few steps with torch's profiler, started by a rule.


DEFAULT_STEPS = 3
MAX_PROFILES = 3
WATCHDOG = "healthcheck-watchdog"
"""Name of the thread that judges silence."""


class Profile:
    """Profile the next optimizer steps and write a trace for ``chrome://tracing`` or Perfetto.

    The profiled steps are slower; their times do not count as normal. It counts optimizer steps, so a
    run that makes none leaves no trace.
    """

    name = "profile"
    stage = "observe"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "steps": {
                "type": "integer",
                "minimum": 1,
                "maximum": 50,
                "description": f"Steps to record (default {DEFAULT_STEPS}).",
            }
        },
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self._running: _Recording | None = None
        self._made = 0
        self._session: Session | None = None

    def listen(self, session: Session) -> None:
        """Count the ends of steps of this session instead of updates of any optimizer, and keep their times out of it.

        Steps end within torch's hooks of optimizers, and torch does not stand it when one comes or goes meanwhile.
        """
        self._session = session

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        if context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "this run keeps no record")
        # No event: a block of short steps was judged, in the thread that trains; or a silence, by the watchdog.
        if context.event is None and threading.current_thread().name == WATCHDOG:
            return ActionOutcome.nothing_done(self.name, "the training thread is not at a step")
        if self._running is not None and not self._running.over:
            return ActionOutcome.nothing_done(self.name, "one is being recorded")
        if _others_record(self._session):
            return ActionOutcome.nothing_done(self.name, "another profiler is recording")
        if self._made >= MAX_PROFILES:
            return ActionOutcome.nothing_done(self.name, f"this run has {MAX_PROFILES} already")
        folder = context.run_dir / "profile"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            return ActionOutcome.nothing_done(self.name, f"{error.strerror or error} ({folder})")
        steps = int(context.options.get("steps", DEFAULT_STEPS))
        path = folder / f"{alert.number:03d}-rank{alert.rank}.json"
        try:
            self._running = _Recording(path, steps, context, self._session)
        except RuntimeError as error:  # another profiler is active
            return ActionOutcome.nothing_done(self.name, f"{error}")
        self._made += 1
        return ActionOutcome.of(self.name, f"profiling the next {steps} steps: {path}", path=str(path))


def _others_record(session: Session | None) -> bool:
    """Whether a profiler is active: torch does not refuse a second one, it crashes."""
    import torch

    return torch.autograd._profiler_enabled() or (session is not None and session.facts.untimed > 0)


class _Recording:
    """One running profiler, ended after so many steps."""

    def __init__(self, path: Path, steps: int, context: ActionContext, session: Session | None) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.path = path
        self.left = steps + context.before_update  # the step that is under way is not a whole one
        self.say = context.say
        self.over = False
        self.profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self.timed: Callable[[], None] = session.untimed() if session is not None else lambda: None
        self.last = -1
        self.forget: list[Callable[[], None]] = []
        try:
            self.profiler.start()
        except BaseException:
            self.timed()
            raise
        if session is None:
            self.forget.append(register_optimizer_step_post_hook(lambda *_: self._stepped()).remove)
        else:
            self.forget.append(session.on("step_end", self._step_over))
            self.forget.append(session.on("train_end", lambda event: self._end()))

    def _step_over(self, event: Event) -> None:
        if event.step != self.last:  # each optimizer of a step may end it
            self.last = event.step
            self._stepped()

    def _stepped(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self._end()

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        for forget in self.forget:
            forget()
        try:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.path.chmod(0o600)
        except (OSError, RuntimeError) as error:
            self.say(f"profile not written: {error}")
            return
        finally:
            self.timed()
        self.say(f"profile written: {self.path}")
