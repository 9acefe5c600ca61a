"""The thread that notices when nothing happens any more. Standard library only, no collectives.

It has ``stale`` rules judged while the training thread cannot. It knows three innocent reasons for silence:
a person at a debugger or prompt, a clock that stood still (Ctrl-Z, a sleeping laptop, a paused
container), and phases that tick through events of their own (evaluation, checkpoints).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from healthcheck.held import no_exit_here, waits_for_a_person
from healthcheck.latch import StopState
from healthcheck.protocols import Clock

TICK = 1.0
"""Seconds between two looks."""
LATE = 3.0
"""A tick that comes this much too late means that the process stood still, not the training."""
GRACE = 5.0
"""Seconds that a graceful end is given before ``mode: abort`` ends a process that hangs."""
REPORT_TIME = 20.0
"""Seconds that the report of an aborted run may take: a probe may wait for a dead device."""


class Watchdog:
    """Has silence judged, from a daemon thread.

    :param last_event: the clock at the last event, the heartbeat of the training.
    :param silence: called with the seconds of silence, at most once per ``tick``; judges them.
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
        stop: StopState,
        finish: Callable[[], object],
        note: Callable[[str], None],
        tick: float = TICK,
        late: float = LATE,
        grace: float = GRACE,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.tick = tick
        self.late = late
        self.grace = grace
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
                self._note(f"the watchdog failed and is off: {type(error).__name__}: {error}")
                return

    def _look(self, now: float) -> None:
        if waits_for_a_person(sys._current_frames().get(threading.main_thread().ident or 0)):
            self._counts_from = now
            return
        stopping = self._stop.request is not None
        self._silence(max(0.0, now - max(self._last_event(), self._counts_from)))
        request = self._stop.request
        if not stopping and request is not None and request.mode == "abort":
            self._abort_since = now
        if self._abort_since is None:
            return
        if self._last_event() > self._abort_since:  # it came back: the adapter stops it at its step
            self._abort_since = None
        elif now - self._abort_since >= self.grace:
            self._abort()

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
