"""How training was left, as an :class:`~healthcheck.outcome.Ending`."""

from __future__ import annotations

from healthcheck.outcome import Ending
from healthcheck.trainers.stopping import caused_by_stop


def ending_of(error: BaseException | None) -> Ending:
    """The ending that an exception means; None is a regular end, and so is our own stop."""
    if error is None or caused_by_stop(error):
        return Ending()
    if isinstance(error, KeyboardInterrupt):
        return Ending(interrupted=True)
    if isinstance(error, SystemExit):
        return Ending(script_exit_code=error.code if isinstance(error.code, int) else int(error.code is not None))
    return Ending(exception=error)
