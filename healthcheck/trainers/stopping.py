"""The stop of a run that knows no other way to be ended than an exception."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.errors import StopTraining
from healthcheck.latch import StopState

PATIENCE = 3
"""How often a script may swallow the stop before the process is ended from under it."""


class StopSwitch:
    """Raises the stop of a run wherever the adapter asks, until it is heeded.

    :param state: the stop of the session.
    :param give_up: called instead of raising for the fourth time; ends the process. Without it
        (a notebook, a test) the stop is raised for ever.
    """

    def __init__(self, state: StopState, give_up: Callable[[], None] | None = None) -> None:
        self.state = state
        self.give_up = give_up

    @property
    def pending(self) -> bool:
        return self.state.request is not None

    def check(self) -> None:
        """Raise ``StopTraining`` if a stop was requested."""
        state = self.state
        request = state.request
        if request is None or state.by_framework:
            return
        if state.raised >= PATIENCE and self.give_up is not None:
            self.give_up()
        state.raised += 1
        raise StopTraining(request.reason, rule=request.rule, step=request.step, exit_code=request.exit_code)


def caused_by_stop(error: BaseException | None) -> bool:
    """Whether an exception is our stop, or was raised while it was being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StopTraining):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
