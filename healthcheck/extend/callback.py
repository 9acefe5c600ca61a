"""For people who want Python instead of YAML: a class with the methods of the events that they care about.

::

    class BestLoss(healthcheck.Callback):
        def on_train_batch_end(self, event):
            event.user_state.setdefault("best_loss.steps", []).append(event.step)

        @healthcheck.rank_zero_only
        def on_validation_end(self, session, event):
            session.note(f"validation: {event.metrics}")

Register an instance with ``session.register(BestLoss())``, or hand it over where a session begins
(``callbacks=[BestLoss()]``). It is a plugin like any other: its errors are its own.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from healthcheck.core.errors import UnknownHookError
from healthcheck.core.text import suggest
from healthcheck.extend.dispatch import ARGUMENTS
from healthcheck.extend.hookspecs import PREFIX, hookimpl

_FAMILIAR = {
    "on_train_batch_start": "step_start",
    "on_train_batch_end": "step_end",
    "on_validation_start": "eval_start",
    "on_validation_batch_end": "eval_step",
    "on_validation_end": "eval_end",
    "on_test_batch_end": "test_step",
    "on_save_checkpoint": "checkpoint_saved",
    "on_train_epoch_start": "epoch_start",
    "on_train_epoch_end": "epoch_end",
}
"""Names under which other callback systems know our events."""

METHODS: dict[str, str] = {**{f"on_{name}": name for name in ARGUMENTS}, **_FAMILIAR}
"""Method of a :class:`Callback` -> event or judgement at which it is called."""

F = TypeVar("F", bound=Callable[..., Any])


class Callback:
    """Base of a callback. Write the methods of :data:`METHODS` that you need; only those are called.

    Each takes what it names of ``session`` and ``event`` (``on_alert``: ``session``, ``alert``;
    ``on_samples``: ``session``, ``step``, ``samples``). They run on every rank: see
    :func:`rank_zero_only`. ``event.user_state`` is one dict for the whole run.

    Raises ``UnknownHookError`` where a class is written with a method ``on_...`` that no event has.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        listening: dict[str, list[str]] = {}
        for name in dir(cls):
            if not name.startswith("on_") or not callable(getattr(cls, name)):
                continue
            if name not in METHODS:
                hint = suggest(name, METHODS) or f"one of {', '.join(METHODS)}"
                raise UnknownHookError(f'{cls.__qualname__}: no event is heard by "{name}"; {hint}')
            listening.setdefault(METHODS[name], []).append(name)
        for event, methods in listening.items():
            setattr(cls, PREFIX + event, _listener(cls, event, methods))


def _listener(cls: type, event: str, methods: list[str]) -> Callable[..., None]:
    """The hook implementation of one event: calls these methods with the arguments that they name."""
    arguments = ARGUMENTS[event]
    taken = {name: _taken(cls, name, arguments) for name in methods}

    def listener(self: Any, *given: Any) -> None:
        for name, positions in taken.items():
            getattr(self, name)(*(given[i] for i in positions))

    # pluggy and our dispatcher look at the names of a hook's arguments.
    names = ("self", *arguments)
    listener.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    listener.__name__ = PREFIX + event
    listener.__qualname__ = f"{cls.__qualname__}.{PREFIX}{event}"
    return hookimpl(listener)


def _taken(cls: type, name: str, arguments: tuple[str, ...]) -> list[int]:
    parameters = list(inspect.signature(getattr(cls, name)).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return list(range(len(arguments)))
    unknown = [
        p.name for p in parameters if p.name not in arguments and p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    if unknown:
        raise UnknownHookError(
            f'{cls.__qualname__}.{name} has no argument "{unknown[0]}"; it can take {", ".join(arguments)}'
        )
    return [arguments.index(p.name) for p in parameters if p.name in arguments]


def rank_zero_only(function: F) -> F:
    """Call a function or method on rank 0 only; elsewhere it returns None at once."""

    @functools.wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _rank((*args, *kwargs.values())) == 0 else None

    return cast("F", on_rank_zero)


def _rank(given: tuple[Any, ...]) -> int:
    """Of the session that is among the arguments, else of this process."""
    for argument in given:
        rank = getattr(getattr(argument, "info", None), "rank", None)
        if isinstance(rank, int):
            return rank
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0
