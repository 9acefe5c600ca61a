"""Tracebacks as plain ``python`` would print them: without the frames of those who watch."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMPILER = os.path.join("torch", "_dynamo", "eval_frame.py")


def trimmed(error: BaseException) -> BaseException:
    """Take our frames out of an exception's traceback, and of those it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _without_ours(current.__traceback__)
        current = current.__cause__ or current.__context__
    return error


def show(error: BaseException) -> None:
    """Print an uncaught exception the way the interpreter does, the script's own hook included."""
    trimmed(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        sys.__excepthook__(type(error), error, error.__traceback__)


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.startswith(_OURS):
            while kept and kept[-1].tb_frame.f_code.co_filename.endswith(_COMPILER):
                kept.pop()  # the frame that keeps the compiler out of ours
        else:
            kept.append(tb)
        tb = tb.tb_next
    for here, following in zip(kept, [*kept[1:], None], strict=False):
        here.tb_next = following
    return kept[0] if kept else None
