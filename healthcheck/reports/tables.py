"""Tables of the views that are for reading, drawn by rich: ``runs``, ``metrics``, ``plan``, ``why``, ``replay`` and others.

On a terminal a table is as wide as the terminal and long cells wrap. In a pipe or a file every row is one line of
plain ASCII layout, so that ``grep`` and ``awk`` see what they saw yesterday, whatever the window was. The console of a
watched run draws no tables: it shares its terminal with the script.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

from healthcheck.core.text import visible, wrapped

PIPED_WIDTH = 2**14
"""Characters of a row that nobody looks at in a window: wide enough that none is ever wrapped."""
SHORT = 20
"""Longest text that stands in one line wherever there is room: a date, a duration, a list of two actions."""
LEAST = 8
"""Width that a column of sentences must get for the others to keep theirs."""
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
    most: int = 0,
) -> list[str]:
    """Lines of a table without rules or boxes, as they fit standard output.

    :param rows: cells of each row; shorter rows are filled up. No rows and no heads make no lines.
    :param align: ``l`` or ``r`` for each column, as in ``llr``; missing ones mean ``l``.
    :param heads: names of the columns. A table without rows has no use for them: then there are no lines either.
    :param indent: spaces before each line.
    :param most: columns of a line, wherever it goes; 0: those of the terminal, and as many as it takes in a pipe.
    """
    cells = [[visible(cell) for cell in row] for row in rows]  # escaped before anything is coloured
    if not cells:
        return []
    import io

    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = _is_terminal()
    width = most or (max(NARROWEST, shutil.get_terminal_size().columns) if on_terminal else PIPED_WIDTH)
    width -= indent
    table = [list(heads), *cells] if heads else cells
    count = max(map(len, table))
    columns = [[row[i] for row in table if i < len(row)] for i in range(count)]
    natural = [max(map(cell_len, column)) for column in columns]
    # Left alone, rich takes space from the widest columns, whatever they hold, and breaks names in the middle. So where
    # there is room for it, columns of names and numbers keep their width, and sentences share the rest.
    flexible = [natural[i] > SHORT and any(" " in cell for cell in columns[i]) for i in range(count)]
    if not any(flexible):
        flexible[-1] = True
    gaps = 2 * (count - 1)
    fixed = gaps + sum(n for n, shares in zip(natural, flexible, strict=True) if not shares)
    sharing = sum(natural) + gaps > width >= fixed + LEAST * sum(flexible)
    drawn = Table(
        box=None,
        show_header=bool(heads),
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
        expand=sharing,
    )
    for i in range(count):
        drawn.add_column(
            Text(heads[i] if i < len(heads) else ""),
            justify="right" if align[i : i + 1] == "r" else "left",
            overflow="fold",  # never drops a character: a number that is cut off would be another number
            no_wrap=sharing and not flexible[i],
            ratio=min(natural[i], 2 * SHORT) if sharing and flexible[i] else None,
        )
    for row in cells:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    out = io.StringIO()
    # Both are said, since rich would else ask variables such as FORCE_COLOR and COLUMNS, and a pipe would depend on them.
    Console(file=out, width=width, force_terminal=on_terminal, legacy_windows=False).print(drawn)
    return [" " * indent + line.rstrip() if line.strip() else "" for line in out.getvalue().splitlines()]


SCREEN = 22
"""Lines of a short view: those of a terminal of 24, less the command and the prompt after it."""
COLUMNS = 80
"""Characters of a line of prose where nobody looks at a window."""
WIDEST = 100
"""Longer lines of prose are hard to read, however wide the window is."""


def prose_width() -> int:
    """Characters of a line of prose on standard output."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size().columns)) if _is_terminal() else COLUMNS


def prose(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """A sentence or a list of words, broken into lines as they fit the terminal.

    :param indent: before the first line; ``further``: before the others, as much if not given.
    """
    return wrapped(text, prose_width(), indent if further is None else further, indent)


def cut(lines: list[str], most: int) -> list[str]:
    """The first lines of a text, which says that there is more where there is."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1]} ..."]


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # no stdout at all, or one that was closed
        return False
