"""Opening a session for a framework's callback, or joining the one that watches this process already."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.trainers import current

if TYPE_CHECKING:
    from healthcheck.session import Session


@dataclass(slots=True)
class SessionOptions:
    """What a user may say when a callback is made; the words of :func:`healthcheck.watch`."""

    rules: Any = None
    profile: str | None = None
    observe: bool | None = None
    fail_on: str | None = None
    max_steps: int | None = None
    off: Sequence[str] = ()
    only: Sequence[str] = ()
    set: Sequence[str] = ()
    mute: Sequence[str] = ()
    settings: Mapping[str, Any] | None = None
    plugins: Sequence[str] = ()
    callbacks: Sequence[Any] = ()
    """Plugin objects, for instance of :class:`healthcheck.Callback`."""
    reports: Mapping[str, str] | None = None
    name: str = ""
    console: bool = True
    record: bool = True
    metrics: Sequence[str] = ()
    """Collected beside those that the rules ask for."""


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


def open_or_join(options: SessionOptions, ranks: tuple[int, int] | None = None) -> tuple[Session, bool]:
    """``(session, ours)``: the session that watches this process, else a new one that the caller must end.

    :param ranks: ``(rank, world size)`` of a framework that starts its ranks itself and names them its own way.

    Raises ``UsageError`` (``RuleFileError`` with all mistakes) before anything is attached.
    """
    running = current.current()
    if running is not None:
        if options.rules is not None:
            running.note("the callback joined the run that healthcheck watches already; its own rules are not used")
        if options.metrics and running.watching:
            running.collect(*options.metrics)
        return running, False
    given: dict[str, Any] = {}
    if options.observe is not None:
        given["mode"] = "observe" if options.observe else "act"
    given |= {k: getattr(options, k) for k in ("fail_on", "max_steps") if getattr(options, k) is not None}
    with _named(ranks):
        session = _open(options, given)
    for callback in options.callbacks:
        session.register(callback)
    return session, True


def _open(options: SessionOptions, given: Mapping[str, Any]) -> Session:
    import healthcheck  # the lazy package: trainers know nothing of the composition root

    session: Session = healthcheck.open_session(
        target=options.name or program_name(),
        rules=options.rules,
        profile=options.profile,
        off=options.off,
        only=options.only,
        set=options.set,
        mute=options.mute,
        settings={**given, **(options.settings or {})},
        plugins=options.plugins,
        reports=options.reports,
        argv=sys.argv,
        console=options.console,
        record=options.record,
        metrics=options.metrics,
    )
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
