"""Built-in actions. They reach the session through the same hook as everybody's.

The tuple is explicit, so that switching plugin loading off cannot remove ``stop``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from healthcheck.actions.cleanup import Cleanup
from healthcheck.actions.control import Checkpoint, Note, ScaleLr, SkipUpdate, Stop, Warn
from healthcheck.actions.diagnostics import AskRanks, DumpStacks, MemorySnapshot, Profile
from healthcheck.actions.evidence import Evidence
from healthcheck.actions.locate import Locate
from healthcheck.core.protocols import Action
from healthcheck.extend.hookspecs import hookimpl

if TYPE_CHECKING:
    from healthcheck.run.session import Session

BUILT_IN: tuple[Callable[[], Action], ...] = (
    Note,
    Warn,
    Evidence,
    Locate,
    DumpStacks,
    AskRanks,
    Profile,
    MemorySnapshot,
    Cleanup,
    SkipUpdate,
    ScaleLr,
    Checkpoint,
    Stop,
)
"""Classes, not objects: what an action remembers (a cooldown) belongs to one session."""


@hookimpl
def healthcheck_register_actions(register: Callable[[Action], None]) -> None:
    for action in BUILT_IN:
        register(action())


@hookimpl
def healthcheck_configure(session: Session) -> None:
    """``locate`` and ``ask_ranks`` have to listen before anything is wrong, ``profile`` to know how; the other actions wait
    for their alert."""
    profile = session.host.registry.actions.get(Profile.name)
    if isinstance(profile, Profile):
        profile.listen(session)
    locate = session.host.registry.actions.get(Locate.name)
    if isinstance(locate, Locate):
        locate.listen(session)
    ask = session.host.registry.actions.get(AskRanks.name)
    if isinstance(ask, AskRanks):
        ask.listen(session)
