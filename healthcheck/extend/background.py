"""Sending things from a thread of its own, for plugins that send samples and alerts somewhere: whoever hands one over never
waits, and the end of a run waits no longer than was said. Standard library only."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class NotSent(Exception):
    """Raised by a ``send`` that did not get through.

    :param reason: in words that may be written into a record: no address, no secret.
    :param again: whether it may be tried again; False: these items are given up.
    :param after: seconds that the other side asked to wait (``Retry-After``); None: the usual pause.
    """

    def __init__(self, reason: str, *, again: bool = True, after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again
        self.after = after


class Undelivered(NamedTuple, Generic[T]):
    """An item that did not arrive, and why."""

    item: T
    reason: str


class SenderThread(threading.Thread):
    """The thread of a sender. What it logs to a tracker is not the script's: it is not taken in as the script's metrics."""


class BackgroundSender(Generic[T]):
    """A bounded queue and a daemon thread that empties it.

    ``put`` costs the step path one lock that nobody holds for long. The thread begins with the first item. A ``send`` that
    raises :class:`NotSent` is tried again with pauses that double; whatever
    else it raises gives its items up, and only the type of that error is kept, since its text may hold an address.

    :param send: called in the thread with up to ``batch`` items, oldest first. It should have a time limit of its own.
    :param name: of the thread.
    :param capacity: items that wait at most. Beyond it, ordinary items are dropped (:attr:`dropped`); important ones take the
        place of the oldest ordinary one.
    :param batch: items that are sent together at most.
    :param attempts: how often the same items are tried.
    :param pause: seconds before the second attempt; each further one waits twice as long, up to ``longest_pause``.
    :param gap: least seconds between two calls of ``send``: a rate limit. What comes meanwhile is sent together.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], None],
        *,
        name: str,
        capacity: int = 1000,
        batch: int = 1,
        attempts: int = 6,
        pause: float = 0.5,
        longest_pause: float = 30.0,
        gap: float = 0.0,
    ) -> None:
        self._send = send
        self._name = name
        self._capacity = capacity
        self._batch = batch
        self._attempts = attempts
        self._pause = pause
        self._longest = longest_pause
        self._gap = gap
        self._lock = threading.Condition()
        self._waiting: deque[tuple[T, bool]] = deque()
        self._under_way: list[T] = []
        self._given_up: list[Undelivered[T]] = []
        self._thread: SenderThread | None = None
        self._deadline: float | None = None
        self._ending = threading.Event()
        self._closed = False
        self._why = ""
        self._pid = os.getpid()
        self.sent = 0
        """Items that arrived."""
        self.dropped = 0
        """Items for which there was no place."""

    def put(self, item: T, *, important: bool = False) -> bool:
        """Hand an item over; never waits for the other side. Returns False where it was dropped, in a forked child, and
        after :meth:`close`."""
        if os.getpid() != self._pid:  # a forked child has the lock and not the thread
            return False
        with self._lock:
            if self._closed:
                return False
            if len(self._waiting) >= self._capacity and not (important and self._make_room()):
                self.dropped += 1
                return False
            self._waiting.append((item, important))
            if self._thread is None:
                self._thread = SenderThread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._lock.notify()
        return True

    def begin_closing(self, within: float = 4.0) -> None:
        """The run ends: what waits is sent now, without gaps, and until so many seconds from now. Does not wait.

        Call it in ``healthcheck_train_end``: several plugins then spend these seconds together and not one after the other.
        Items are taken until :meth:`close`.
        """
        if os.getpid() == self._pid:
            with self._lock:
                if self._deadline is None:
                    self._deadline = time.monotonic() + within
                    self._ending.set()

    def close(self, within: float = 4.0) -> list[Undelivered[T]]:
        """Wait until all has arrived or the time is over; returns what did not arrive, oldest first.

        :param within: seconds from now, unless :meth:`begin_closing` has set the end already.
        """
        if os.getpid() != self._pid:
            return []
        self.begin_closing(within)
        with self._lock:
            self._closed = True
            self._lock.notify()
            thread, deadline = self._thread, self._deadline
        if thread is not None and deadline is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            late = f"{self._why}; " if self._why else ""
            rest = [*self._under_way, *(item for item, _ in self._waiting)]
            self._waiting.clear()
            self._under_way = []
            return [*self._given_up, *(Undelivered(item, f"{late}not sent before the end of the run") for item in rest)]

    def _make_room(self) -> bool:
        """Drop the oldest ordinary item."""
        for index, (_, important) in enumerate(self._waiting):
            if not important:
                del self._waiting[index]
                self.dropped += 1
                return True
        return False

    def _work(self) -> None:
        last = float("-inf")
        while True:
            with self._lock:
                while not self._waiting and not self._closed:
                    self._lock.wait()
                if not self._waiting:
                    return
            self._sleep(last + self._gap - time.monotonic())
            with self._lock:
                items = [self._waiting.popleft()[0] for _ in range(min(self._batch, len(self._waiting)))]
                self._under_way = items
            if items:
                last = time.monotonic()
                self._deliver(items)

    def _deliver(self, items: list[T]) -> None:
        pause, reason = self._pause, ""
        for attempt in itertools.count(1):
            if attempt > 1 and self._deadline is not None and time.monotonic() >= self._deadline:
                return  # what is under way counts as not sent
            try:
                self._send(items)
            except NotSent as error:
                reason = self._why = error.reason
                # At the end of a run there is no later time: attempts go on until it is over.
                if not error.again or (attempt >= self._attempts and not self._ending.is_set()):
                    break
                self._sleep(min(pause if error.after is None else error.after, self._longest))
                pause = min(2 * pause, self._longest)
                continue
            except BaseException as error:
                reason = self._why = type(error).__name__
                break
            with self._lock:
                self.sent += len(items)
                self._under_way, self._why = [], ""
            return
        with self._lock:
            if self._under_way:  # else the end of the run has counted them already
                self._given_up += [Undelivered(item, reason) for item in items]
                del self._given_up[: -self._capacity]
                self._under_way = []

    def _sleep(self, seconds: float) -> None:
        """Pause; once the run ends, half a second at most."""
        if seconds > 0 and self._ending.wait(seconds):
            time.sleep(min(seconds, 0.5))
