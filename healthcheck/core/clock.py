"""The two clocks: the live one, and a virtual one for replay and rule tests. Standard library only."""

from __future__ import annotations

import time


class LiveClock:
    """Real time."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class VirtualClock:
    """Time that moves only when somebody advances it."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ActiveTime:
    """Seconds of active training: evaluations and test runs do not count.

    Whoever has read the clock already computes them from :attr:`origin` and :attr:`paused_at`, as :meth:`at` does:
    on the step path one reading and no call are enough for an event.
    """

    def __init__(self, clock: LiveClock | VirtualClock) -> None:
        self.clock = clock
        self.started = clock.monotonic()
        self.origin = self.started
        """The moment from which active seconds count. Every pause moves it on by its length."""
        self.paused_at: float | None = None
        """When the pause at hand began; None while training goes on."""
        self._depth = 0

    def __call__(self) -> float:
        return self.at(self.clock.monotonic())

    def at(self, now: float) -> float:
        """Active seconds at a moment of the clock."""
        return (now if self.paused_at is None else self.paused_at) - self.origin

    def pause(self, now: float) -> None:
        """Evaluations nest (a test run inside an evaluation); only the outermost one stops the time."""
        self._depth += 1
        if self.paused_at is None:
            self.paused_at = now

    def resume(self, now: float) -> None:
        """The end of a pause. One without a beginning is ignored: some trainers announce only the end."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self.paused_at is not None:
            self.origin += now - self.paused_at
            self.paused_at = None
