"""SIGTERM and SIGINT while a script is watched: the report is written, and Ctrl-C ends the training between two steps.

The script keeps its own handlers: it sets and reads handlers as ever, ours stand behind them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from healthcheck.instrument.patching import Patches

if TYPE_CHECKING:
    from healthcheck.instrument.machine import StepMachine
    from healthcheck.run.session import Session


class InFront:
    """Our handler of one signal, with the script's own remembered and shown to the script as if it were installed.

    :param name: of the signal: ``SIGTERM``. A system without it is left alone.
    """

    name = ""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._pid = os.getpid()
        self._scripts: Any = signal.SIG_DFL
        self.number: Any = getattr(signal, self.name, None)

    def install(self) -> None:
        """Stand in front of the handler that is there. One that others set outside Python, or to ignore, is left alone."""
        if self.number is None or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(self.number)
        if before is None or before is signal.SIG_IGN:
            return
        self._scripts = before
        signal.signal(self.number, self._on_signal)
        self._patches.on_restore(self._give_back)
        self._patches.replace(signal, "signal", self._signal)
        self._patches.replace(signal, "getsignal", self._getsignal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def _give_back(self) -> None:
        if os.getpid() == self._pid and threading.current_thread() is not threading.main_thread():
            return
        if _plain("getsignal")(self.number) == self._on_signal:
            _plain("signal")(self.number, self._scripts)

    def _signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_handler(signalnum: Any, handler: Any) -> Any:
            if not self._patches.active or signalnum != self.number:
                return original(signalnum, handler)
            if threading.current_thread() is not threading.main_thread() or not _valid(handler):
                return original(signalnum, handler)  # raises as it always does
            before, self._scripts = self._scripts, handler
            if handler is signal.SIG_IGN:
                original(signalnum, handler)
            else:
                original(signalnum, self._on_signal)
            return before

        return set_handler

    def _getsignal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_handler(signalnum: Any) -> Any:
            if self._patches.active and signalnum == self.number:
                return self._scripts
            return original(signalnum)

        return get_handler


class TerminationReport(InFront):
    """Calls ``report(signal number)`` when SIGTERM is about to end the process; it does so if that is True.

    A script that handles SIGTERM itself goes on as it would: its handler is called, and the report comes with its own
    end.
    """

    name = "SIGTERM"

    def __init__(self, report: Callable[[int], bool], patches: Patches) -> None:
        super().__init__(patches)
        self._report = report

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if callable(self._scripts):
            self._scripts(number, frame)
            return
        if os.getpid() == self._pid and not self._report(number):
            return
        _plain("signal")(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


QUIET = 10.0
"""Seconds without an event of the training after which Ctrl-C does not wait for the step: it may never end."""


class StepBoundary(InFront):
    """The first Ctrl-C lets the step at hand end, and raises ``KeyboardInterrupt`` there; the second raises it at once.

    At once is also the first one outside of training: before the first step, in an evaluation, where nothing has been
    heard for some seconds; and with several ranks, of which each would end at another step. A script with a handler of
    its own keeps it.
    """

    name = "SIGINT"

    def __init__(self, session: Session, machine: StepMachine, patches: Patches) -> None:
        super().__init__(patches)
        self._session = session
        self._machine = machine

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stop = self._session.stop
        if os.getpid() == self._pid and self._scripts is signal.default_int_handler and self._in_a_step():
            stop.interrupt()
            _say("healthcheck: interrupted, ends after this step; press Ctrl-C again to end at once")
            return
        stop.interrupt_is_over()
        if callable(self._scripts):
            self._scripts(number, frame)
            return
        _plain("signal")(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _in_a_step(self) -> bool:
        session = self._session
        return (
            self._machine.started
            and not session.stop.interrupted
            and session.stop.request is None
            and session.info.world_size == 1
            and session.report is None
            and session.active.paused_at is None
            and session.clock.monotonic() - session.last_event_at < QUIET
        )


def _say(text: str) -> None:
    """A line on stderr, without the streams of Python: a signal may come while they are at work."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode("ascii", "replace"))


def _plain(name: str) -> Callable[..., Any]:
    """A function of the module ``signal`` as it was before anybody of us replaced it."""
    function: Any = getattr(signal, name)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def _valid(handler: Any) -> bool:
    return callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)
