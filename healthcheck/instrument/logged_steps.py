"""To which step a value belongs that a script logs: the one in which it is logged, whatever rules are on.

Between two updates nothing that torch shows says where one turn of the loop ends and the next begins, and what is heard at
all (batches, losses) depends on the rules. But code runs from top to bottom: what is logged behind the line that made the last
update belongs to that update's step, what is logged before that line, or in another call of the function that has it, to the next.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from healthcheck.instrument.step_events import EndedBy

if TYPE_CHECKING:
    from healthcheck.run.session import Session

Place = list[tuple[int, int, int]]
"""The functions that are running, innermost first: the frame and its code by their ids, and the instruction that it is at. Frames
themselves are not kept: they hold on to all local variables."""


class Counting(Protocol):
    """The step machine, as far as it is needed here."""

    session: Session
    ended_by: EndedBy
    number: int
    fresh: bool | None


class LoggedSteps:
    """Where in the script the last update was made, or attempted, and what is logged before or behind it."""

    def __init__(self, machine: Counting) -> None:
        self._machine = machine
        self._place: Place | None = None
        self._step = 0
        self._heard = False
        """Whether anything was logged so far."""
        machine.session.step_of_log = self.now

    def attempt(self, step: int) -> int:
        """An update is attempted, or its step said to be over, by who has called us; returns ``step``."""
        self._step = step
        # A framework says itself when its steps are over, from under dozens of frames.
        self._place = None if self._machine.ended_by is EndedBy.FRAMEWORK else _place(sys._getframe(1))
        return step

    def left_out(self, step: int) -> None:
        """The same for a step that nobody watches. Of a script that has logged nothing so far nobody looks up where it is:
        should it begin to log in such a step, what it logs until the next update belongs to the last one."""
        self._step = step
        self._place = _place(sys._getframe(1)) if self._heard else None

    def now(self) -> int:
        """The step of a value that is logged now, from 1."""
        machine, last = self._machine, self._step
        self._heard = True
        if self._place is None or machine.ended_by is EndedBy.FRAMEWORK:
            return max(1, machine.number)
        if machine.number > last and machine.fresh:
            return last + 1  # the next step's pass has begun: of several that make one update, perhaps
        return last + 1 if _is_next_turn(self._place, _place(sys._getframe(1))) else max(1, last)


def _place(frame: FrameType | None) -> Place:
    place: Place = []
    while frame is not None:
        place.append((id(frame), id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return place


def _is_next_turn(update: Place, log: Place) -> bool:
    """Whether a loop has come round between the update and this call."""
    within = False
    for (frame, code, at), (other, its_code, its_at) in zip(reversed(update), reversed(log), strict=False):
        if (frame, code) != (other, its_code):
            return within  # called from one and the same instruction, twice; or another thread's, of which nothing is known
        if at != its_at:
            return its_at < at
        within = True
    return False
