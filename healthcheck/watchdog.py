"""The thread that notices when nothing happens any more. Standard library only, no collectives.

It judges ``stale`` rules while the training thread cannot. It knows three innocent reasons for silence:
a person at a debugger or prompt, a clock that stood still (Ctrl-Z, a sleeping laptop, a paused
container), and phases that tick through events of their own (evaluation, checkpoints).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from healthcheck.held import held_by_a_person, no_exit_here
from healthcheck.outcome import Ending

if TYPE_CHECKING:
    from healthcheck.session import Session

TICK = 1.0
"""Seconds between two looks."""
LATE = 3.0
"""A tick that comes this much too late means that the process stood still, not the training."""
GRACE = 5.0
"""Seconds that a graceful end is given before ``mode: abort`` ends a process that hangs."""
REPORT_TIME = 20.0
"""Seconds that the report of an aborted run may take: a probe may wait for a dead device."""


class Watchdog:
    """Judges silence for one session, from a daemon thread.

    :param session: ``last_event`` is its heartbeat; ``watchdog_tick`` is called with the seconds of
        silence, at most once per ``tick``.
    :param leave: ends the process; ``os._exit`` but for tests of this class.
    """

    def __init__(
        self,
        session: Session,
        *,
        tick: float = TICK,
        late: float = LATE,
        grace: float = GRACE,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.session = session
        self.tick = tick
        self.late = late
        self.grace = grace
        self._leave = leave
        self._over = threading.Event()
        self._pid = os.getpid()
        self._counts_from = session.clock.monotonic()
        self._abort_since: float | None = None
        self._thread = threading.Thread(target=self._watch, name="healthcheck-watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._counts_from = self.session.clock.monotonic()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread. Safe to call twice, from a child process and from the thread itself."""
        self._over.set()
        if self._thread is not threading.current_thread() and os.getpid() == self._pid and self._thread.is_alive():
            self._thread.join(timeout=2 * self.tick)

    # -- inside -----------------------------------------------------------------------

    def _watch(self) -> None:
        expected = self.session.clock.monotonic() + self.tick
        while not self._over.wait(self.tick):
            if os.getpid() != self._pid:  # a fork that kept this thread does not exist; be sure anyway
                return
            now = self.session.clock.monotonic()
            if now - expected > self.late:
                self._counts_from = now
            expected = now + self.tick
            try:
                self._look(now)
            except Exception as error:
                self.session.note(f"the watchdog failed and is off: {type(error).__name__}: {error}")
                return

    def _look(self, now: float) -> None:
        if held_by_a_person(sys._current_frames().get(threading.main_thread().ident or 0)):
            self._counts_from = now
            return
        stopping = self.session.stop_request is not None
        heard = self.session.last_event[1]
        self.session.watchdog_tick(max(0.0, now - max(heard, self._counts_from)))
        stop = self.session.stop_request
        if not stopping and stop is not None and stop.mode == "abort":
            self._abort_since = now
        if self._abort_since is None:
            return
        if self.session.last_event[1] > self._abort_since:  # it came back: the adapter stops it at its step
            self._abort_since = None
        elif now - self._abort_since >= self.grace:
            self._abort()

    def _abort(self) -> None:
        """``mode: abort`` of a rule on silence: write the report, then end the process from here."""
        self._over.set()
        reason = no_exit_here()
        if reason:
            self.session.note(f"the process hangs; it is not ended, because it is {reason}")
            return
        stop = self.session.stop_request
        code = stop.exit_code if stop is not None else 1
        writer = threading.Thread(target=self._report, daemon=True)
        writer.start()
        writer.join(REPORT_TIME)
        self._leave(code or 1)

    def _report(self) -> None:
        try:
            self.session.finish(Ending())
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):
                    pass


def watch_if_needed(session: Session) -> Watchdog | None:
    """A started watchdog if some rule judges silence, else None: then no thread exists."""
    return Watchdog(session).start() if session.engine.needs_watchdog else None
