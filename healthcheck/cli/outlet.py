"""What commands print passes here: whatever a file, a record or a name holds is escaped before a terminal or a log has it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from healthcheck.core.text import visible_lines

_COLOURS = re.compile(r"(\x1b\[(?:[0-4]|3[0-7])?(?:;(?:[0-4]|3[0-7]))*m)")
"""Bold, dim and the plain colours, as our tables have them on a terminal."""


class Outlet:
    """A text stream that escapes what is written to it, line by line; see :func:`healthcheck.core.text.visible_lines`.

    :attr:`raw` is the stream behind it: for pictures that are drawn over themselves, and for commands to a CI system.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw
        self._begins = True

    def write(self, text: str) -> int:
        parts = _COLOURS.split(text) if self.raw.isatty() else [text]
        # What a CI system takes for a command is one only where the line begins.
        safe = "".join(part if n % 2 else self._safe(part) for n, part in enumerate(parts))
        if text:
            self._begins = text.endswith("\n")
        self.raw.write(safe)
        return len(text)

    def _safe(self, part: str) -> str:
        return visible_lines(part) if self._begins else visible_lines(f"|{part}")[1:]

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: Any) -> Any:
    """The stream behind an :class:`Outlet`; any other stream is its own."""
    return stream.raw if isinstance(stream, Outlet) else stream


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
    """Standard output and error as outlets, while a command runs."""
    before = sys.stdout, sys.stderr
    out, error = (None if stream is None else Outlet(stream) for stream in before)
    sys.stdout, sys.stderr = out, error
    try:
        yield
    finally:
        # Somebody else's stream that was put in place meanwhile stays.
        if sys.stdout is out:
            sys.stdout = before[0]
        if sys.stderr is error:
            sys.stderr = before[1]


def print_commands(text: str) -> None:
    """Print commands for a CI system, made of text that was escaped for it."""
    print(text, file=raw(sys.stdout))
