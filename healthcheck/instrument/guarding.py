"""Our own code inside somebody's training: what goes wrong in it must not end the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.extend.guard import from_signal_handler

if TYPE_CHECKING:
    from healthcheck.run.session import Session


def guarded(session: Session, function: Callable[..., Any], *given: Any) -> Any:
    """Call one of ours; its error is kept in the report, and None is returned, unless it passes on."""
    try:
        return function(*given)
    except Exception as error:
        contain(session, error, getattr(function, "__name__", ""))
        return None


def contain(session: Session, error: Exception, method: str) -> None:
    """Keep an error of ours in the report; to be called where it was caught. Raises it again if it passes on.

    For the few places that a training passes several times a step; others use :func:`guarded`.
    """
    if passes_on(session, error):
        raise error
    session.monitor_error(error, method)


def passes_on(session: Session, error: BaseException) -> bool:
    """Whether an error reaches the training all the same: under ``on_plugin_error: raise`` the user wants
    it to, and what a signal handler of the script raised while our code ran is the script's.
    """
    return session.dispatch.on_error == "raise" or from_signal_handler(error)
