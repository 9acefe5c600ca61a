"""How a run ends: the stop that a rule asks for, the length that the user asked for, and how a loop was left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from healthcheck.errors import StopTraining
from healthcheck.latch import StopState
from healthcheck.outcome import Ending

if TYPE_CHECKING:
    from healthcheck.session import Session

PATIENCE = 3
"""How often a script may swallow the stop before the process is ended from under it."""


class StopSwitch:
    """Raises the stop of a run wherever the adapter asks, until it is heeded.

    :param state: the stop of the session.
    :param give_up: called instead of raising for the fourth time; ends the process. Without it
        (a notebook, a test) the stop is raised for ever.
    :param deferred: see :attr:`deferred`.
    """

    def __init__(self, state: StopState, give_up: Callable[[], None] | None = None, *, deferred: bool = False) -> None:
        self.state = state
        self.give_up = give_up
        self._deferred = deferred

    @property
    def pending(self) -> bool:
        """Whether a stop was requested. On the step path look at ``state.request``, which is no call."""
        return self.state.request is not None

    @property
    def deferred(self) -> bool:
        """True while a loop is asked to end in its own way: nothing is raised, and no update is applied."""
        return self._deferred or self.state.by_framework

    def check(self) -> None:
        """Raise ``StopTraining`` if a stop was requested, unless the loop ends in its own way."""
        if not self._deferred:
            self.insist()

    def insist(self) -> None:
        """Raise ``StopTraining`` if a stop was requested: the loop did not end. A framework is left to its own way."""
        state = self.state
        request = state.request
        if request is None or state.by_framework:
            return
        if state.raised >= PATIENCE and self.give_up is not None:
            self.give_up()
        state.raised += 1
        raise StopTraining(request.reason, rule=request.rule, step=request.step, exit_code=request.exit_code)


class AskedEnd:
    """``max_steps`` and ``max_time``: the user's own end, at a step boundary."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._most_steps = session.settings.get("max_steps")
        self._most_seconds = session.settings.get("max_time")
        self.possible = bool(self._most_steps or self._most_seconds)
        """Whether there is anything to check."""

    def check(self, step: int, *, made: int) -> None:
        """Ask for the stop once ``made`` steps of this run, or its time, are enough."""
        session, reason = self._session, ""
        if self._most_steps and made >= int(self._most_steps):
            reason = f"asked for {int(self._most_steps):,} steps"
        # Not with several ranks, whose clocks would not agree.
        elif self._most_seconds and session.info.world_size == 1 and self._elapsed() >= float(self._most_seconds):
            reason = f"asked for {float(self._most_seconds):g} s"
        if reason and session.controls is not None:
            session.controls.request_stop(reason, rule="", step=step, mode="graceful", exit_code=0)

    def _elapsed(self) -> float:
        return self._session.clock.monotonic() - self._session.active.started


def caused_by_stop(error: BaseException | None) -> bool:
    """Whether an exception is our stop, or was raised while it was being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StopTraining):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def ending_of(error: BaseException | None) -> Ending:
    """The ending that an exception means; None is a regular end, and so is our own stop."""
    if error is None or caused_by_stop(error):
        return Ending()
    if isinstance(error, KeyboardInterrupt):
        return Ending(interrupted=True)
    if isinstance(error, SystemExit):
        return Ending(script_exit_code=error.code if isinstance(error.code, int) else int(error.code is not None))
    return Ending(exception=error)
