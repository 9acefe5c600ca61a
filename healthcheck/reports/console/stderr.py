"""Writing whole lines to stderr beside other people's progress bars; never an error of ours.

Only stderr (in a notebook the cell's output), only ASCII, no cursor tricks. A stream that is closed, broken or full is given up
after one try of the interpreter's original stderr: training goes on in silence.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from healthcheck.reports.console.notebook import show
from healthcheck.reports.text import ascii_only

_COLOURS = {"red": "31", "yellow": "33", "cyan": "36", "green": "32", "bold": "1"}


class Stderr:
    """Where the console report writes. Looks at ``sys.stderr`` at each write: scripts replace it."""

    def __init__(self) -> None:
        self.given_up = False

    def write(self, lines: list[str]) -> None:
        """Write lines in one go, above any active bar; in a notebook, as a block of its own."""
        if self.given_up or not lines or show(lines):
            return
        text = ascii_only("\n".join(lines)) + "\n"
        for stream in dict.fromkeys((sys.stderr, sys.__stderr__)):
            if stream is None:
                continue
            try:
                if not _above_tqdm(stream, text):
                    _put(stream, text)
                return
            except (OSError, ValueError):  # broken pipe, full disk, closed file
                continue
        self.given_up = True

    def colour(self, text: str, name: str) -> str:
        """``text`` in a colour where that is wanted: FORCE_COLOR, NO_COLOR, else a terminal."""
        return f"\x1b[{_COLOURS[name]}m{text}\x1b[0m" if wants_colour(sys.stderr) else text


def wants_colour(stream: TextIO | None) -> bool:
    """``NO_COLOR`` wins over ``FORCE_COLOR``, both over what the stream is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    if stream is None or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def _put(stream: TextIO, text: str) -> None:
    if stream is sys.__stderr__ and os.name == "posix":
        # Past the stream's own buffer: what could not be written must not fail again in the
        # interpreter's last flush, which would change the script's exit status.
        stream.flush()
        data = text.encode("ascii")
        number = stream.fileno()
        while data:
            try:
                data = data[os.write(number, data) :]
            except BlockingIOError:
                return
        return
    stream.write(text)
    stream.flush()


def _above_tqdm(stream: TextIO, text: str) -> bool:
    """Let tqdm clear its bars, write and draw them again. False if no bar of tqdm is active."""
    module: Any = sys.modules.get("tqdm.std")
    if module is None:
        return False
    try:
        bars = [bar for bar in list(module.tqdm._instances) if not getattr(bar, "disable", False)]
        if not any(getattr(bar, "fp", None) is not None for bar in bars):
            return False
        with module.tqdm.external_write_mode(file=stream):
            _put(stream, text)
        return True
    except (AttributeError, TypeError, RuntimeError):  # another version, or a bar that closes meanwhile
        return False
