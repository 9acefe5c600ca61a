"""A checkpoint by which a run goes on: what its file is known by, and what was kept for it.

A file is known again by its bytes; nothing of it is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from healthcheck.core.digest import sha256

HEAD, TAIL = 64 * 2**10, 2**20
"""Bytes of a file that are digested. Torch writes a directory with a checksum of every tensor at the end."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file is known by: its bytes are compared, never unpickled."""

    path: str
    size: int
    digest: str

    def same_content(self, other: FileMark) -> bool:
        """Also for a file that was renamed, copied, or fetched from somewhere since."""
        return self.size == other.size and self.digest == other.digest


@dataclass(slots=True)
class Found:
    """A checkpoint of an earlier run."""

    run: str
    step: int
    state: Mapping[str, Any] | None
    """``Session.state_dict()`` at the checkpoint; None if it cannot be read any more."""
    normal: Mapping[str, Any] = field(default_factory=dict)
    ended: str = ""
    """How that run ended, in words: ``stopped at 130 by loss-not-finite``."""
    stop: tuple[str, int] | None = None
    """Rule and step of the fault that stopped it."""
    changed: str = ""
    """Why the state cannot be used, although the path is known."""


class StateStore(Protocol):
    """Where detector states are kept between runs."""

    def keep(self, mark: FileMark | None, step: int, state: Mapping[str, Any], normal: Mapping[str, Any]) -> None:
        """:param mark: None where another rank has written the file."""
        ...

    def find(self, mark: FileMark) -> Found | None: ...

    def kept(self, run: str, step: int) -> Found:
        """What this rank knew at that step of an earlier run; else what rank 0 knew."""
        ...

    def continues(self, found: Found) -> int:
        """Put down that this run goes on from there; returns which attempt it is."""
        ...


def mark_of(where: Any) -> FileMark | None:
    """The mark of a path or an open file; None for what is no file."""
    try:
        if not isinstance(where, (str, os.PathLike)):
            if where.writable():
                where.flush()
            where = where.name
            if not isinstance(where, str):
                return None
        path = os.path.realpath(os.fsdecode(os.fspath(where)))
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            head = file.read(HEAD)
            file.seek(max(HEAD, size - TAIL))
            digest = sha256(head, file.read(TAIL))
    except (OSError, AttributeError, TypeError, ValueError):
        return None
    return FileMark(path, size, digest.hexdigest())
