"""What may be said when a session is opened, and opening one."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from healthcheck.core import opener
from healthcheck.core.clock import LiveClock, VirtualClock

if TYPE_CHECKING:
    from healthcheck.run.session import Session

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True, kw_only=True)
class SessionOptions:
    """What may be said of a run that is to be watched: by ``healthcheck.watch``, a callback, a command or a test."""

    rules: Any = None
    """Path, pack name, dict of rules, YAML text, or a list of these; None finds the nearest ``healthcheck.yaml``, then
    ``[tool.healthcheck]``, else the recommended pack."""
    profile: str | None = None
    off: Sequence[str] = ()
    """Rules to switch off."""
    only: Sequence[str] = ()
    """The only rules to judge."""
    set: Sequence[str] = ()
    """``RULE.KEY=VALUE``: one key of one rule."""
    mute: Sequence[str] = ()
    """``RULE@A..B``: judged in these steps, but nothing is done."""
    force: bool = False
    """Lets ``mute`` name rules for NaN."""
    observe: bool | None = None
    """Judge and report, never act."""
    fail_on: str | None = None
    max_steps: int | None = None
    settings: Mapping[str, Any] | None = None
    """Settings by their names, stronger than environment and files; the options above are stronger still."""
    plugins: Sequence[str] = ()
    """Local plugins, by file or module."""
    strict_plugins: bool = False
    """A plugin that cannot be loaded is an error."""
    callbacks: Sequence[Any] = ()
    """Plugin objects, for instance of :class:`healthcheck.Callback`."""
    reports: Mapping[str, str] | None = None
    """``{"json": "path"}``: outputs beside the record."""
    metrics: Sequence[str] = ()
    """Measured beside those that the rules ask for."""
    name: str = ""
    """What is being run, as reports call it: ``train.py`` or ``-m pkg.train``."""
    argv: Sequence[str] = ()
    """Its command line, for the record."""
    console: bool = True
    """False keeps stderr quiet (tests, libraries)."""
    record: bool | Path = True
    """False writes no folder for the run; a path: that one, inside the record of a job that has begun already."""
    rank_zero_comes: bool = False
    """Rank 0 of this launch is known to be watched once it trains, so that its record is not waited for."""
    clock: LiveClock | VirtualClock | None = None
    """None: real time."""

    def all_settings(self) -> dict[str, Any]:
        """:attr:`settings` with those that have a word of their own."""
        given: dict[str, Any] = {**(self.settings or {})}
        if self.observe is not None:
            given["mode"] = "observe" if self.observe else "act"
        if self.fail_on is not None:
            given["fail_on"] = self.fail_on
        if self.max_steps is not None:
            given["max_steps"] = self.max_steps
        if self.reports:
            given["report"] = dict(self.reports)
        return given


def takes_options(function: F) -> F:
    """Show the words of :class:`SessionOptions` where a function passes them on: in ``help()``, in a notebook."""
    known = inspect.signature(function)
    words = inspect.signature(SessionOptions).parameters
    own = [p for p in known.parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [p for name, p in words.items() if name not in known.parameters]
    function.__signature__ = known.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return function


def switched_off() -> bool:
    """``HEALTHCHECK=off``: every API is a no-op."""
    return os.environ.get("HEALTHCHECK", "").strip().lower() in ("off", "0", "false", "no")


def program_name() -> str:
    """What runs in this process, as people call it: the script's file name, or ``notebook``."""
    name = os.path.basename(sys.argv[0] or "")
    return "notebook" if name in ("", "ipykernel_launcher.py", "colab_kernel_launcher.py") else name


def rank_of_process() -> tuple[int, int] | None:
    """``(rank, world size)`` of the process group, or None without one."""
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def open_here(options: SessionOptions, ranks: tuple[int, int] | None = None) -> Session:
    """A session for what runs in this process, which the caller must end.

    :param ranks: ``(rank, world size)`` of a framework that starts its ranks itself and names them its own way.

    Raises ``UsageError`` (``RuleFileError`` with all mistakes) before anything is attached.
    """
    with _named(ranks):
        session: Session = opener.open_session(
            replace(options, name=options.name or program_name(), argv=options.argv or sys.argv)
        )
    session.layers.opened_with = options  # who asked for it is known by these, and has not to join
    return session


@contextlib.contextmanager
def _named(ranks: tuple[int, int] | None) -> Iterator[None]:
    """The usual variables of launchers, where a framework's own launcher has not set them."""
    if ranks is None or ranks[1] < 2 or "RANK" in os.environ:
        yield
        return
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK=str(ranks[0]), WORLD_SIZE=str(ranks[1]))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
