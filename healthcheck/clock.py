"""The two clocks: the live one, and a virtual one for replay and rule tests. Standard library only."""

from __future__ import annotations

import time


class LiveClock:
    """Real time."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class ActiveTime:
    """Seconds of active training: evaluation, checkpoints and other pauses do not count."""

    def __init__(self, clock: LiveClock | VirtualClock) -> None:
        self.clock = clock
        self.started = clock.monotonic()
        self.paused = 0.0
        self._pause_began: float | None = None
        self._depth = 0

    def __call__(self) -> float:
        return self.at(self.clock.monotonic())

    def at(self, now: float) -> float:
        """The same where the clock was read already."""
        if self._pause_began is not None:
            now = self._pause_began
        return now - self.started - self.paused

    def pause(self) -> None:
        self._depth += 1
        if self._pause_began is None:
            self._pause_began = self.clock.monotonic()

    def resume(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._pause_began is not None:
            self.paused += self.clock.monotonic() - self._pause_began
            self._pause_began = None
