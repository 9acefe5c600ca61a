"""SIGTERM while a script is watched: write the report, then die as the script would have.

The script keeps its own handler: it sets and reads handlers as ever, ours stands behind them.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from healthcheck.trainers.patching import Patches


class TerminationReport:
    """Calls ``report(signal number)`` when SIGTERM is about to end the process; it does so if that is True.

    A script that handles SIGTERM itself goes on as it would: its handler is called, and the report
    comes with its own end.
    """

    def __init__(self, report: Callable[[int], bool], patches: Patches) -> None:
        self._report = report
        self._patches = patches
        self._pid = os.getpid()
        self._scripts: Any = signal.SIG_DFL

    def install(self) -> None:
        if not hasattr(signal, "SIGTERM") or threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before is None or before is signal.SIG_IGN:  # set by others, outside Python or on purpose
            return
        self._scripts = before
        signal.signal(signal.SIGTERM, self._on_signal)
        self._patches.on_restore(self._give_back)
        self._patches.replace(signal, "signal", self._signal)
        self._patches.replace(signal, "getsignal", self._getsignal)
        _restore_in_children(self._patches)

    def _give_back(self) -> None:
        if os.getpid() == self._pid and threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._scripts)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if callable(self._scripts):
            self._scripts(number, frame)
            return
        if os.getpid() == self._pid and not self._report(number):
            return
        self._set(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    @staticmethod
    def _set(number: int, handler: Any) -> None:
        getattr(signal.signal, "__wrapped__", signal.signal)(number, handler)

    def _signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_handler(signalnum: Any, handler: Any) -> Any:
            if not self._patches.active or signalnum != signal.SIGTERM:
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
            if self._patches.active and signalnum == signal.SIGTERM:
                return self._scripts
            return original(signalnum)

        return get_handler


_attached: weakref.WeakSet[Patches] = weakref.WeakSet()
_listening = False


def _restore_in_children(patches: Patches) -> None:
    """A forked child has the functions and handlers that its script set, and nothing of ours.

    Fork callbacks cannot be taken back, so that there is one for the process, without references.
    """
    global _listening
    _attached.add(patches)
    if not _listening and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore_all)
        _listening = True


def _restore_all() -> None:
    for patches in list(_attached):
        if patches.active:
            patches.restore()


def _valid(handler: Any) -> bool:
    return callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)
