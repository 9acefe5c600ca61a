"""Tables of the views that are for reading, drawn by rich: ``runs``, ``metrics``, ``plan``, ``why``, ``replay`` and others.

On a terminal a table is as wide as the terminal and long cells wrap. In a pipe or a file every row is one line of
plain ASCII layout, so that ``grep`` and ``awk`` see what they saw yesterday, whatever the window was. The console of a
watched run draws no tables: it shares its terminal with the script.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

PIPED_WIDTH = 2**14
"""Characters of a row that nobody looks at in a window: wide enough that none is ever wrapped."""
NARROWEST = 40
"""Below this many characters a table is drawn as if there were so many, and the terminal breaks its lines."""

_STYLES = {
    "error": "red",
    "ERROR": "red",
    "failed": "red",
    "warning": "yellow",
    "WARN": "yellow",
    "warned": "yellow",
    "ok": "green",
    "running": "cyan",
    "info": "cyan",
    "INFO": "cyan",
}
"""Cells that are drawn in colour on a terminal. The word always stands there too: colour only repeats it."""


def table_lines(
    rows: Iterable[Sequence[str]],
    align: str = "",
    *,
    heads: Sequence[str] = (),
    indent: int = 2,
) -> list[str]:
    """Lines of a table without rules or boxes, as they fit standard output.

    :param rows: cells of each row; shorter rows are filled up. No rows and no heads make no lines.
    :param align: one letter per column, ``l`` or ``r``; missing ones mean ``l``.
    :param heads: names of the columns. A table without rows has no use for them: then there are no lines either.
    :param indent: spaces before each line, which the width leaves out.
    """
    cells = [list(row) for row in rows]
    if not cells:
        return []
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, show_header=bool(heads), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    count = max(len(heads), *map(len, cells))
    for i in range(count):
        # "fold" never drops a character: a number that is cut off would be another number.
        drawn.add_column(
            Text(heads[i] if i < len(heads) else ""),
            justify="right" if align[i : i + 1] == "r" else "left",
            overflow="fold",
        )
    for row in cells:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    on_terminal = _is_terminal()
    width = max(NARROWEST, shutil.get_terminal_size().columns) if on_terminal else PIPED_WIDTH
    out = io.StringIO()
    # Both are said, since rich would else ask variables such as FORCE_COLOR and COLUMNS, and a pipe would depend on them.
    Console(file=out, width=width - indent, force_terminal=on_terminal, legacy_windows=False).print(drawn)
    return [" " * indent + line.rstrip() if line.strip() else "" for line in out.getvalue().splitlines()]


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # no stdout at all, or one that was closed
        return False
