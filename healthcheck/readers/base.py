"""What every reader builds on: its protocol, its errors, and numbers as logs write them."""

from __future__ import annotations

import gzip
import io
import math
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from healthcheck.core.errors import UsageError


class UnreadableRunError(UsageError):
    """A recorded run cannot be read. The message names the file, the reason and the next step.

    ``replay`` reports it and goes on with the other runs.
    """

    slug = "unreadable-run"

    def __init__(self, path: Path, problem: str, advice: str = "") -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" + (f"; {advice}" if advice else ""))


# --------------------------------------------------------------------------------------------------
# What readers share: the head of a file, and opening text whatever its encoding.


HEAD_BYTES = 65536
"""How much of a file ``recognises`` is shown."""

PEEK_ROWS = 400
"""Rows that are looked at before columns get their names. The only rows kept in memory."""

UNNAMED = "column"
"""Columns of a table without a header are called ``column1``, ``column2``, ..."""

GZIP = b"\x1f\x8b"


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


# --------------------------------------------------------------------------------------------------
# One cell of text as a number. NaN, infinity, zero, missing and text are five different things.


_MISSING = frozenset(
    {"", "-", "--", "na", "n/a", "#n/a", "none", "null", "nil", "no log", "not logged", "missing", "<na>", "?", "."}
)
"""Words that say "there is no value in this cell" (lower case)."""

_WRAPPED = re.compile(r"^(?:tensor\(|array\(|\[)+\s*([-+]?[\w.]+(?:[-+]\d+)?)")
"""``tensor(0.5, device='cuda:0')`` and ``[0.5]``: what ``print`` makes of a tensor in a cell."""

_DECIMAL_COMMA = re.compile(r"^[-+]?\d+,\d+(?:[eE][-+]?\d+)?$")


def cell(text: str, *, decimal_comma: bool = False) -> float | str | None:
    """The value of one text cell: a number (also NaN and infinity), ``None`` if missing, else the text."""
    try:
        return float(text)
    except ValueError:
        pass
    text = text.strip()
    if text.lower() in _MISSING:
        return None
    if decimal_comma and _DECIMAL_COMMA.match(text):
        return float(text.replace(",", "."))
    for candidate in (text.removesuffix("%"), _unwrapped(text)):
        try:
            return float(candidate)
        except ValueError:
            continue
    return text


def _unwrapped(text: str) -> str:
    match = _WRAPPED.match(text)
    return match.group(1) if match else text


_HUGE = sys.float_info.max


def to_number(value: Any) -> float | None:
    """A JSON value as a number: strings such as ``"nan"`` and ``"2.31"`` count, ``true`` does not."""
    kind = value.__class__
    if kind is float:
        number: float = value
        return number
    if kind is int:
        # JSON's integers have any number of digits; beyond a float's range they are what a float would be.
        return value if -_HUGE < value < _HUGE else math.inf if value > 0 else -math.inf
    if kind is str:
        found = cell(value)
        return found if isinstance(found, float) else None
    return None


def to_seconds(value: Any, scale: float = 1.0) -> float | None:
    """A time cell in seconds: a number, an ISO date, or ``1:02:03``. ``None`` if it is none of them.

    Numbers above 1e11 are milliseconds since 1970, above 1e14 microseconds.
    """
    number = to_number(value)
    if number is not None:
        if number != number:
            return None
        if number > 1e14:
            return number / 1e6
        return number / 1e3 if number > 1e11 else number * scale
    if value.__class__ is not str:
        return None
    text = value.strip().replace(",", ".")
    try:
        parsed = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        return _clock(text)
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=timezone.utc)  # only differences matter
    return parsed.timestamp()


def _clock(text: str) -> float | None:
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        return None
    try:
        numbers = [float(p) for p in parts]
    except ValueError:
        return None
    seconds = 0.0
    for number in numbers:
        seconds = seconds * 60 + number
    return seconds
