"""The session that watches this process, if any, and what a script gives to it: ``healthcheck.log`` and ``healthcheck.metric``.

``log`` must cost next to nothing when nobody watches: it looks at one list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from healthcheck.core.errors import UsageError

if TYPE_CHECKING:
    from healthcheck.core.events import Event
    from healthcheck.run.session import Session

Function = TypeVar("Function", bound=Callable[[Any], Any])

_sessions: list[Session] = []
_feeds: dict[int, Any] = {}
"""Session id -> what feeds it from torch, for adapters that join."""
_declared: dict[str, DeclaredMetric] = {}


def current() -> Session | None:
    """The session that watches this process now, or None."""
    return _sessions[-1] if _sessions else None


def enter(session: Session, feed: Any = None) -> None:
    """Make a session the current one; adapters call it.

    :param feed: the :class:`~healthcheck.instrument.sources.TorchFeed` of the session, if any.
    """
    _sessions.append(session)
    for declared in _declared.values():  # before the session began, by a script that opens it itself
        _measure(session, declared)
    if feed is not None:
        _feeds[id(session)] = feed


def feed_of(session: Session) -> Any:
    """What feeds a session from torch already, or None."""
    return _feeds.get(id(session))


def leave(session: Session) -> None:
    if session in _sessions:
        _sessions.remove(session)
    if session not in _sessions:
        _feeds.pop(id(session), None)


# --------------------------------------------------------------------------- for scripts


def log(*, step: int | None = None, **metrics: Any) -> None:
    """Feed metrics of your own to the watching session; does nothing when nothing watches.

    ``healthcheck.log(reward=r, kl=kl)``. Values are numbers or 0-dim tensors; device tensors are
    taken without a wait. Names with dots go in a dict: ``log(**{"eval.bleu": 31.2})``.

    They belong to the step of the turn of the loop that logs them, above the update and below it alike, whatever rules are on.
    ``step`` names another one.
    """
    if _sessions:
        _sessions[-1].log(metrics, step=step)


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """A metric that a script declares as a function of its model."""

    name: str
    function: Callable[[Any], Any]
    every: int


def metric(name: str, *, every: int = 1) -> Callable[[Function], Function]:
    """Measure a function of the model: ``@healthcheck.metric("attn_entropy", every=50)``.

    The function gets the module that is being trained (the first one, where there are several; with its wrapper,
    where it has one) after the update of every ``every``-th step, and returns a number, a 0-dim tensor (taken
    without a wait) or None. It is called without gradients, and only if some rule asks for the metric; a rule
    file names it under ``external:``, as a metric that the script logs. Without a watched run nothing is called.
    An error in it is shown once and never ends training.

    Raises ``UsageError`` for an empty name, or a number of steps below 1.
    """
    if not name or every < 1:
        raise UsageError(f"healthcheck.metric({name!r}, every={every}): a name, and every how many steps from 1 on")

    def declare(function: Function) -> Function:
        declared = _declared[name] = DeclaredMetric(name, function, every)
        session = current()
        if session is not None:
            _measure(session, declared)
        return function

    return declare


def _measure(session: Session, declared: DeclaredMetric) -> None:
    if not session.demand.wants(declared.name):
        return

    def measured(event: Event) -> None:
        # A second declaration of the same name, as when a notebook's cell is run again, takes the place of the first.
        if event.model is None or event.step % declared.every or _declared.get(declared.name) is not declared:
            return
        modules = event.model.named_modules()
        if not modules:
            return
        import torch

        with torch.no_grad():
            value = declared.function(modules[0][1])
        if value is not None:
            session.log({declared.name: value}, step=event.step)

    measured.__qualname__ = f"metric {declared.name}"
    session.on("after_update", measured)
