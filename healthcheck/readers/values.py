"""One cell of text as a number. NaN, infinity, zero, missing and text are five different things."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

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


def to_number(value: Any) -> float | None:
    """A JSON value as a number: strings such as ``"nan"`` and ``"2.31"`` count, ``true`` does not."""
    kind = value.__class__
    if kind is float or kind is int:
        number: float = value
        return number
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
