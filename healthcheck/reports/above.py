"""What a script prints while a live view is drawn: whole lines appear above it, bars of other libraries below it.

``tqdm`` and ``rich`` draw over themselves with carriage returns and cursor movements, which would tear a view that does the
same. Such a frame is not passed on: the newest one is shown as part of the view.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

MOVES = re.compile(r"\x1b\[(?:\?25[lh]|\d*(?:;\d*)?[A-HJKSTf])")
"""Escape sequences that move the cursor, hide it or erase; colours are none of them."""
MOST = 4
"""Lines of a frame that are shown."""


class Above:
    """Stands in for ``sys.stdout`` or ``sys.stderr`` while a view is drawn; all else is asked of the stream itself.

    :param say: prints whole lines above the view.
    """

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream, self._say = stream, say
        self._part = ""
        self.frame = ""
        """What is drawn over itself here just now."""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            lines = self._take(text)
        if lines:  # outside of the lock: what prints them may write here
            self._say("\n".join(lines))
        return len(text)

    def _take(self, text: str) -> list[str]:
        if MOVES.search(text):
            shown = MOVES.sub("", text)
            over = shown.endswith("\n")  # what is drawn last ends with a line of its own
            frame = [line.rpartition("\r")[2] for line in shown.rstrip("\n").split("\n")]
            frame = [line for line in frame if line.strip()]
            self.frame = "" if over else "\n".join(frame[-MOST:]) or self.frame
            return frame if over else []
        *whole, part = (self._part + text).split("\n")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in whole]
        if "\r" in part:  # the newest state of a line that is written over; behind a last return it is to come
            self.frame = part.rpartition("\r")[2] or part.rstrip("\r").rpartition("\r")[2]
            part = part.rpartition("\r")[2]
        elif whole:
            self.frame = ""
        self._part = part
        return lines

    def flush(self) -> None:
        """Whole lines are passed on at once; half of one waits for its end."""

    def close_part(self) -> None:
        """What was left without a line end, where the view ends."""
        with self._lock:
            part, self._part, self.frame = self._part, "", ""
        if part.strip():
            self._say(part)


class Redirected:
    """Both streams of the process go above a view, as far as they are its terminal.

    :param say: prints whole lines above the view.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[str, TextIO] = {}
        self._put: dict[str, Above] = {}

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            try:
                there = stream is not None and stream.isatty()
            except (AttributeError, ValueError):
                there = False
            if there:
                self._before[name] = stream
                self._put[name] = Above(stream, self._say)
                setattr(sys, name, self._put[name])

    @property
    def frame(self) -> str:
        """What other libraries draw over themselves just now."""
        return "\n".join(above.frame for above in self._put.values() if above.frame)

    def end(self) -> None:
        """Give the streams back, unless somebody has replaced them since."""
        for name, stream in self._before.items():
            self._put[name].close_part()
            if getattr(sys, name) is self._put[name]:
                setattr(sys, name, stream)
        self._before.clear()
