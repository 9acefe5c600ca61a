"""The stop of a run that knows no other way to be ended than an exception."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.errors import StopTraining

PATIENCE = 3
"""How often a script may swallow the stop before the process is ended from under it."""


class StopSwitch:
    """Remembers a requested stop and raises it wherever the adapter asks, until it is heeded.

    :param give_up: called instead of raising for the fourth time; ends the process. Without it
        (a notebook, a test) the stop is raised for ever.
    """

    def __init__(self, give_up: Callable[[], None] | None = None) -> None:
        self.give_up = give_up
        self.raised = 0
        self.held = False
        """True while a framework ends its loop in its own way: nothing is raised, and no update is applied."""
        self._stop: tuple[str, str, int, int] | None = None

    def request(self, reason: str, *, rule: str, step: int, exit_code: int) -> None:
        self._stop = (reason, rule, step, exit_code)

    @property
    def pending(self) -> bool:
        return self._stop is not None

    def check(self) -> None:
        """Raise ``StopTraining`` if a stop was requested."""
        if self._stop is None or self.held:
            return
        if self.raised >= PATIENCE and self.give_up is not None:
            self.give_up()
        self.raised += 1
        reason, rule, step, exit_code = self._stop
        raise StopTraining(reason, rule=rule, step=step, exit_code=exit_code)


def caused_by_stop(error: BaseException | None) -> bool:
    """Whether an exception is our stop, or was raised while it was being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StopTraining):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
