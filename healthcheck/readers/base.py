"""What readers share: the head of a file, and opening text whatever its encoding."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import IO, Any, NamedTuple

HEAD_BYTES = 65536
"""How much of a file ``recognises`` is shown."""

PEEK_ROWS = 400
"""Rows that are looked at before columns get their names. The only rows kept in memory."""

GZIP = b"\x1f\x8b"


class Position(NamedTuple):
    """Where a row stands, for formats that say so themselves. ``None`` in a field: look in the columns."""

    step: int | None = None
    time: float | None = None
    phase: str | None = None


def read_head(path: Path) -> bytes:
    """The first bytes of a file (unpacked if gzip)."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(GZIP):
        with gzip.open(path, "rb") as packed:
            try:
                return packed.read(HEAD_BYTES)
            except (OSError, EOFError):
                return b""
    # A log that was cut while its program wrote on begins with a hole.
    return head.lstrip(b"\x00") if head.startswith(b"\x00" * 64) else head


def open_text(path: Path) -> IO[str]:
    """Open as text: UTF-8 (with or without mark), UTF-16 with mark; other bytes become U+FFFD."""
    with path.open("rb") as file:
        start = file.read(4)
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if start.startswith(GZIP):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding=encoding, errors="replace", newline=None)
    return path.open("r", encoding=encoding, errors="replace", newline=None)


def head_text(head: bytes) -> str:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return head.decode("utf-16", "replace")
    return head.decode("utf-8-sig", "replace")


def is_binary(head: bytes) -> bool:
    return b"\x00" in head[:4096] and head[:2] not in (b"\xff\xfe", b"\xfe\xff")


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one level: ``{"metrics": {"loss": 1}}`` -> ``{"metrics/loss": 1}``."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if value.__class__ is dict:
            out.update(flat(value, f"{name}/"))
        else:
            out[name] = value
    return out
