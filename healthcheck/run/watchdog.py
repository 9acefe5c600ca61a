"""The thread that notices when nothing happens any more. Standard library only, no collectives.

It has ``stale`` rules judged while the training thread cannot. It knows three innocent reasons for silence:
a person at a debugger or prompt, a clock that stood still (Ctrl-Z, a sleeping laptop, a paused
container), and phases that are slow and live (:mod:`healthcheck.run.phases`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from healthcheck.core.protocols import Clock
from healthcheck.core.text import duration, shorten
from healthcheck.extend.guard import describe, running_in
from healthcheck.run.actor import StopState
from healthcheck.run.phases import Phases, phase_of

TICK = 1.0
"""Seconds between two looks."""
LATE = 3.0
"""A tick that comes this much too late means that the process stood still, not the training."""
GRACE = 5.0
"""Seconds that a graceful end is given before ``mode: abort`` ends a process that hangs."""
PLUGIN_HANGS = 10.0
"""Seconds of silence from which a plugin is named in whose code the training stands."""
REPORT_TIME = 20.0
"""Seconds that the report of an aborted run may take: a probe may wait for a dead device."""


class Watchdog:
    """Has silence judged, from a daemon thread.

    :param last_event: the clock at the last event, the heartbeat of the training.
    :param silence: called with the seconds of silence, at most once per ``tick``; judges them.
    :param budget: seconds that a compiler, an evaluation or a checkpoint may take before its silence is judged.
    :param stop: the stop of the run; one with ``mode: abort`` that ``silence`` brought is carried out here.
    :param finish: ends the run and writes its report.
    :param note: says one line to the user.
    :param leave: ends the process; ``os._exit`` but for tests of this class.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        last_event: Callable[[], float],
        silence: Callable[[float], None],
        budget: Callable[[], float] = float,
        stop: StopState,
        finish: Callable[[], object],
        note: Callable[[str], None],
        tick: float = TICK,
        late: float = LATE,
        grace: float = GRACE,
        plugin_hangs: float = PLUGIN_HANGS,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.tick = tick
        self.late = late
        self.grace = grace
        self.plugin_hangs = plugin_hangs
        self._clock = clock
        self._last_event = last_event
        self._silence = silence
        self._stop = stop
        self._finish = finish
        self._note = note
        self._leave = leave
        self._over = threading.Event()
        self._pid = os.getpid()
        self._counts_from = clock.monotonic()
        self._abort_since: float | None = None
        self._phases = Phases(budget)
        self._named: tuple[str, str] | None = None
        self._thread = threading.Thread(target=self._watch, name="healthcheck-watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._counts_from = self._clock.monotonic()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread. Safe to call twice, from a child process and from the thread itself."""
        self._over.set()
        if self._thread is not threading.current_thread() and os.getpid() == self._pid and self._thread.is_alive():
            self._thread.join(timeout=2 * self.tick)

    # -- inside -----------------------------------------------------------------------

    def _watch(self) -> None:
        expected = self._clock.monotonic() + self.tick
        while not self._over.wait(self.tick):
            if os.getpid() != self._pid:  # a fork that kept this thread does not exist; be sure anyway
                return
            now = self._clock.monotonic()
            if now - expected > self.late:
                self._counts_from = now
            expected = now + self.tick
            try:
                self._look(now)
            except Exception as error:
                self._note(f"the watchdog failed and is off: {describe(error)}")
                return

    def _look(self, now: float) -> None:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        frame = frames.pop(threading.main_thread().ident or 0, None)
        if waits_for_a_person(frame):
            self._counts_from = now
            return
        self._name_plugin(frame, now - max(self._last_event(), self._counts_from))
        stopping = self._stop.request is not None
        silent = max(0.0, now - max(self._last_event(), self._counts_from))
        if self._last_event() > self._counts_from:
            self._phases.over()
        if (silent >= self.tick or self._phases.going_on) and self._phases.excuses(
            phase_of((frame, *frames.values())), silent, now
        ):
            self._counts_from = now  # what comes after it is not as old
        else:
            self._stop.hangs = silent >= self.tick
            try:
                self._silence(silent)
            finally:
                self._stop.hangs = False
        request = self._stop.request
        if not stopping and request is not None and request.mode == "abort":
            self._abort_since = now
        if self._abort_since is None:
            return
        if self._last_event() > self._abort_since:  # it came back: the adapter stops it at its step
            self._abort_since = None
        elif now - self._abort_since >= self.grace:
            self._abort()

    def _name_plugin(self, frame: FrameType | None, silent: float) -> None:
        """Say once whose code the training waits for. It is not ended: nobody knows what it holds."""
        found = running_in(frame) if silent >= self.plugin_hangs else None
        if found is None or found[:2] == self._named:
            return
        owner, hook, stack = found
        self._named = owner, hook
        where = shorten(stack, 5)
        self._note(f'the training has waited {duration(silent)} for the plugin "{owner}" in {hook}: {where}')

    def _abort(self) -> None:
        """``mode: abort`` of a rule on silence: write the report, then end the process from here."""
        self._over.set()
        reason = no_exit_here()
        if reason:
            self._note(f"the process hangs; it is not ended, because it is {reason}")
            return
        request = self._stop.request
        code = request.exit_code if request is not None else 1
        writer = threading.Thread(target=self._report, daemon=True)
        writer.start()
        writer.join(REPORT_TIME)
        self._leave(code or 1)

    def _report(self) -> None:
        try:
            self._finish()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):
                    pass


# --------------------------------------------------------------------------- people, and processes that must not end

_DEBUGGERS = ("bdb", "pdb", "ipdb", "pudb", "pydevd", "debugpy", "_pydevd_bundle", "remote_pdb", "web_pdb")
_PROMPTS = {
    ("code", "raw_input"),
    ("cmd", "cmdloop"),
    ("_pyrepl", ""),
    ("prompt_toolkit", ""),
    ("IPython", "prompt_for_code"),
    ("IPython", "raw_input"),
    ("ptpython", ""),
    ("bpython", ""),
    ("ipykernel", "raw_input"),
    ("ipykernel", "_input_request"),
}
"""(package, function) that wait for someone to type; an empty function means all of the package."""
_EXECUTING = {("IPython", "run_code"), ("code", "runcode")}
"""Frames of a shell that runs somebody's code at this moment: what is inside is training, not typing."""


def waits_for_a_person(frame: FrameType | None) -> bool:
    """True if the main thread is in a debugger, ``breakpoint()``, or at an interactive prompt.

    :param frame: the innermost frame of the main thread; None if it runs no Python code.
    """
    if frame is None:
        return hasattr(sys, "ps1")  # the plain prompt waits in C
    shell_waits = False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        function = frame.f_code.co_name
        if package in _DEBUGGERS or _traced_by_debugger(frame):
            return True
        if not shell_waits:
            if _listed(_EXECUTING, package, function):
                return _debugger_outside(frame.f_back)
            if _listed(_PROMPTS, package, function):
                return True
        if package == "ipykernel":
            shell_waits = True  # no cell runs: the kernel waits for the next one
        frame = frame.f_back
    return shell_waits


def _debugger_outside(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


# Between two stops of a debugger none of its frames need be on the stack; its trace function is.
def _traced_by_debugger(frame: FrameType) -> bool:
    """A debugger set its trace function on this frame (coverage tools do as well, and do not count)."""
    owner = getattr(frame.f_trace, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(frame.f_trace, "__module__", "")
    return str(module).split(".")[0] in _DEBUGGERS


def _listed(table: set[tuple[str, str]], package: str, function: str) -> bool:
    return (package, function) in table or (package, "") in table


def no_exit_here() -> str:
    """Why this process must not be ended by ``os._exit``, in words; empty if it may."""
    if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:  # children inherit the variable only
        return "a test run"
    shell = sys.modules.get("IPython")
    if shell is not None and getattr(shell, "get_ipython", lambda: None)() is not None:
        return "a notebook or an interactive shell"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive shell"
    return ""
