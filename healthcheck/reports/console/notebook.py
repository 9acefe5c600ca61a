"""In a notebook the lines of the console become one compact block of HTML, with the plain text as its fallback."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

_COLOURS = (
    (re.compile(r"^(ERROR|healthcheck: (STOPPED|FAILED|SCRIPT FAILED|INTERNAL ERROR|NOT JUDGED))"), "#c0392b"),
    (re.compile(r"^WARN"), "#b7791f"),
    (re.compile(r"^healthcheck: OK"), "#2e8b57"),
)
"""How a block begins -> the colour of its edge. The words say it too."""
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_STYLE = "padding:.1em .8em;margin:.3em 0;font-family:monospace;font-size:.9em;white-space:pre-wrap"


class Block:
    """Some lines for IPython's ``display``: HTML where the front end can, else text."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = [_ESCAPES.sub("", line) for line in lines]

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        first, *rest = map(escape, self.lines)
        edge = next((colour for begins, colour in _COLOURS if begins.match(self.lines[0])), "#8a939c")
        text = "\n".join([f"<b>{first}</b>", *rest])
        return f'<div style="border-left:3px solid {edge};{_STYLE}">{text}</div>'


def show(lines: Sequence[str]) -> bool:
    """Show lines in the notebook that this code runs in; False where there is none."""
    ipython: Any = sys.modules.get("IPython")
    if ipython is None or not lines:
        return False
    try:
        if not hasattr(ipython.get_ipython(), "kernel"):
            return False  # an IPython shell in a terminal
        ipython.display.display(Block(lines))
        return True
    except Exception:  # a front end that cannot: the text goes to stderr, as everywhere else
        return False
