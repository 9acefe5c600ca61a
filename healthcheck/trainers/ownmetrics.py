"""Metrics that a script declares as functions of its model, one line each, without a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from healthcheck.errors import UsageError

if TYPE_CHECKING:
    from healthcheck.events import Event
    from healthcheck.session import Session

Function = TypeVar("Function", bound=Callable[[Any], Any])

_declared: dict[str, Own] = {}


@dataclass(frozen=True, slots=True)
class Own:
    """One declared metric."""

    name: str
    function: Callable[[Any], Any]
    every: int


def metric(name: str, *, every: int = 1) -> Callable[[Function], Function]:
    """Measure a function of the model: ``@healthcheck.metric("attn_entropy", every=50)``.

    The function gets the module that is being trained (the first one, where there are several; with its wrapper,
    where it has one) after the update of every ``every``-th step, and returns a number, a 0-dim tensor (taken
    without a wait) or None. It is called without gradients, and only if some rule asks for the metric; a rule
    file names it under ``external:``, as a metric that the script logs. Without a watched run nothing is called.
    An error in it is told once and never ends training.
    """
    if not name or every < 1:
        raise UsageError(f"healthcheck.metric({name!r}, every={every}): a name, and every how many steps from 1 on")

    def declare(function: Function) -> Function:
        from healthcheck.trainers.current import current

        own = _declared[name] = Own(name, function, every)
        session = current()
        if session is not None:
            _measure(session, own)
        return function

    return declare


def measure_declared(session: Session) -> None:
    """What was declared before the session began, in a script that opens it itself."""
    for own in _declared.values():
        _measure(session, own)


def _measure(session: Session, own: Own) -> None:
    if not session.demand.wants(own.name):
        return

    def measured(event: Event) -> None:
        if event.model is None or event.step % own.every or _declared.get(own.name) is not own:
            return
        modules = event.model.named_modules()
        if not modules:
            return
        import torch

        with torch.no_grad():
            value = own.function(modules[0][1])
        if value is not None:
            session.log({own.name: value}, step=event.step)

    measured.__qualname__ = f"metric {own.name}"
    session.on("after_update", measured)
