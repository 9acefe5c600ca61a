"""Rule files that were read before: what they say, and that their shape is right, kept on disk.

Reading the packs takes a script's start a tenth of a second, most of it in YAML and in the schema's validator, which need not
even be imported where a text is known. A text is kept with what was read from it and compared, and under the version of whatever
reads it: what is kept cannot be out of date. Without a folder to write to everything is read each time.

``HEALTHCHECK_CACHE`` names another folder; ``off`` keeps nothing.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from healthcheck.core.digest import sha256
from healthcheck.core.version import VERSION

MOST = 64
"""Texts that are kept; the oldest go first."""
_READERS = ("document.py", "loader.py", "parsed.py", "validation.py", "yamltree.py")
SHIPPED = "shipped-shapes.txt"
"""Beside this file: the seals of the packs that are shipped. Written by ``docs/_generate.py``, which validates them."""
_SUM = 4
"""Bytes of the checksum before what is kept: it tells a file that was cut short."""

known: dict[str, set[str]] = {}
"""A text -> marks of the formats whose shape it has."""


def find(text: str) -> tuple[Any, Any] | None:
    """``(data, places)`` of a text without a mistake, if it was read before. What is known of its shape is in :data:`known`."""
    folder = _folder()
    if folder is None:
        return None
    try:
        content = (folder / _name(text)).read_bytes()
        # Marshal is no judge of what it is given; a file that was written to its end is as we wrote it.
        if _checksum(content[_SUM:]) != content[:_SUM]:
            return None
        stamp, kept, data, places, formats = marshal.loads(content[_SUM:])
    except (OSError, ValueError, EOFError, TypeError):
        return None
    if stamp != _stamp() or kept != text:
        return None
    known.setdefault(text, set()).update(formats)
    return data, places


def keep(text: str, data: Any, places: Any) -> None:
    """Keep a text whose shape is right: see :data:`known`. Never fails."""
    folder = _folder()
    if folder is None:
        return
    with contextlib.suppress(OSError, ValueError):
        content = marshal.dumps((_stamp(), text, data, places, sorted(known.get(text, ()))))
        folder.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_checksum(content) + content)
            os.replace(made, folder / _name(text))
        except OSError:
            os.unlink(made)
            raise
        kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in kept[:-MOST]:
            path.unlink(missing_ok=True)


def mark(text: str) -> str:
    """Two checksums and the length of a text: who meets a text with the same mark compares the texts."""
    # `hashlib` would bring OpenSSL, which takes 3.6 MB of memory in a process that does little else than read rules.
    content = text.encode("utf-8", "surrogatepass")
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}-{len(content)}"


def seal(text: str, format: str) -> str:
    """What only this text has together with the format, given by its mark, whose shape it has."""
    return sha256(f"{format}\n".encode(), text.encode("utf-8", "surrogatepass")).hexdigest()


def is_shipped(text: str, format: str) -> bool:
    """Whether this very text is shipped, and was found to have the shape of this very format when it was.

    So the first start after an installation needs no validator: 0.1 s and 4 MiB. A pack that was edited, and a schema to which
    a plugin has added a condition, are looked at as any other file is.
    """
    return seal(text, format) in _seals()


@functools.cache
def _seals() -> frozenset[str]:
    try:
        lines = (Path(__file__).parent / SHIPPED).read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(line.rpartition(" ")[2] for line in lines)


def _name(text: str) -> str:
    return mark(f"{_stamp()}\n{text}")


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_SUM, "big")


@functools.cache
def _stamp() -> str:
    """What reads, and what it is written for: another version of either has files of its own."""
    here = Path(__file__).parent
    marks = []
    for name in _READERS:
        with contextlib.suppress(OSError):
            found = (here / name).stat()
            marks.append(f"{name} {found.st_mtime_ns} {found.st_size}")
    return f"{VERSION} {sys.implementation.cache_tag} {marks}"


def _folder() -> Path | None:
    given = os.environ.get("HEALTHCHECK_CACHE", "").strip()
    if given.lower() in ("off", "0", "no", "false"):
        return None
    if given:
        return Path(given)
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "healthcheck" / "rules"
    except RuntimeError:  # nobody's home
        return None
