"""Stretches of a run whose time is not the training's: a profiler records them, say, and slows them down on purpose."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.clock import ActiveTime
from healthcheck.core.runinfo import RunFacts
from healthcheck.run.board import ProbeBoard


class Untimed:
    """Called, it begins such a stretch and returns what ends it. They may overlap."""

    def __init__(self, active: ActiveTime, facts: RunFacts, board: ProbeBoard) -> None:
        self._active = active
        self._facts = facts
        self._board = board

    def __call__(self) -> Callable[[], None]:
        now = self._active.clock.monotonic()
        self._facts.untimed += 1
        self._active.pause(now)
        self._board.time_stands_still(now, None)
        over = False

        def end() -> None:
            nonlocal over
            if over:
                return
            over = True
            until = self._active.clock.monotonic()
            self._facts.untimed -= 1
            self._active.resume(until)
            self._board.time_stands_still(now, until)

        return end
