"""The session that watches this process, if any. ``healthcheck.log`` lives here.

``log`` must cost next to nothing when nobody watches: it looks at one list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healthcheck.trainers.ownmetrics import measure_declared

if TYPE_CHECKING:
    from healthcheck.session import Session

_sessions: list[Session] = []
_sources: dict[int, Any] = {}
"""Session id -> what feeds it from torch, for adapters that join."""


def current() -> Session | None:
    """The session that watches this process now, or None."""
    return _sessions[-1] if _sessions else None


def log(*, step: int | None = None, **metrics: Any) -> None:
    """Feed metrics of your own to the watching session; does nothing when nothing watches.

    ``healthcheck.log(reward=r, kl=kl)``. Values are numbers or 0-dim tensors; device tensors are
    taken without a wait. Names with dots go in a dict: ``log(**{"eval.bleu": 31.2})``.
    """
    if _sessions:
        _sessions[-1].log(metrics, step=step)


def enter(session: Session, source: Any = None) -> None:
    """Make a session the current one; adapters call it.

    :param source: the :class:`~healthcheck.trainers.source.TorchSource` that feeds the session, if any.
    """
    _sessions.append(session)
    measure_declared(session)
    if source is not None:
        _sources[id(session)] = source


def source_of(session: Session) -> Any:
    """What feeds a session from torch already, or None."""
    return _sources.get(id(session))


def leave(session: Session) -> None:
    if session in _sessions:
        _sessions.remove(session)
    if session not in _sessions:
        _sources.pop(id(session), None)
