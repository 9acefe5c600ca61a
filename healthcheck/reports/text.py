"""Numbers, steps, durations and sizes as a person reads them. Plain ASCII.

Every output (console, ``why``, ``metrics``, ``runs``) uses these, so that a step is always
"step 1,502" and a duration always "5 m 12 s".
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TextIO

from healthcheck.rulelang.quantities import size_text

RIGHT = 88
"""Column at which the closing line's exit code stands, where the text before it is shorter."""


def number(value: float | None, unit: str = "") -> str:
    """A number with three to four significant digits: ``2.31``, ``14,200``, ``3e-04``, ``nan``.

    :param unit: the unit of :class:`~healthcheck.samples.Metric`: ``bytes``, ``s``, ``fraction``,
        ``1/s`` or empty.
    """
    if value is None:
        return "-"
    value = float(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if unit == "bytes":
        return size_text(value)
    if unit == "s":
        return _seconds(value)
    if unit == "fraction":
        return f"{plain(value * 100)} %"
    if unit in ("1/s", "/s"):
        return f"{plain(value)}/s"
    return plain(value)


def _seconds(value: float) -> str:
    """``2.66 ms``, ``250 ms``, ``12.4 s``, ``5 m 12 s``."""
    if 0 < abs(value) < 1e-4:
        return f"{plain(value * 1e6)} us"
    if 0 < abs(value) < 1:
        return f"{plain(value * 1e3)} ms"
    return duration(value) if value >= 100 else f"{plain(value)} s"


def plain(value: float) -> str:
    """A finite number without a unit."""
    size_of = abs(value)
    if size_of >= 1e7 or 0 < size_of < 1e-3:
        return f"{value:.3g}"
    if value == int(value):
        return f"{int(value):,}"
    if size_of >= 1000:
        return f"{value:,.0f}"
    if size_of >= 100:
        return f"{value:.1f}"
    if size_of >= 1:
        return f"{value:.2f}" if size_of < 9.995 else f"{value:.1f}"
    return f"{value:.3g}"


def mentions(text: str, what: str) -> bool:
    """Whether a number stands in a text as a word of its own: "2" does not stand in "loss is 20"."""
    return re.search(rf"(?<![\w.,]){re.escape(what)}(?![\w]|[.,]\d)", text) is not None


def step(n: int) -> str:
    """``1,502``."""
    return f"{n:,}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``41 s``, ``5 m 12 s``, ``1 h 10 min``, ``3 d 4 h``, ``10 years``."""
    if not math.isfinite(seconds):
        return "unknown"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    if hours >= 2 * 365 * 24:
        return f"{hours / (365 * 24):.0f} years"
    return f"{hours // 24} d {hours % 24} h"


def moment(seconds: float) -> str:
    """``2026-11-28 01:27``, local time: what people compare with their clock. Files hold UTC."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def plural(n: int, word: str, many: str = "") -> str:
    """``1 alert``, ``3 alerts``, ``1,560 steps``."""
    return f"{n:,} {word if n == 1 else many or word + 's'}"


def ascii_only(text: str) -> str:
    """The same text without a character that some code page lacks."""
    return text if text.isascii() else text.encode("ascii", "backslashreplace").decode("ascii")


def columns(rows: Iterable[Sequence[str]], align: str = "", indent: int = 2, gap: int = 2) -> list[str]:
    """Rows of cells as lines with aligned columns.

    :param align: one letter per column, ``l`` or ``r``; missing ones mean ``l``.
    """
    table = [list(row) for row in rows]
    if not table:
        return []
    count = max(len(row) for row in table)
    widths = [max((len(row[i]) for row in table if i < len(row)), default=0) for i in range(count)]
    lines = []
    for row in table:
        cells = [
            cell.rjust(widths[i]) if align[i : i + 1] == "r" else cell.ljust(widths[i]) for i, cell in enumerate(row)
        ]
        lines.append(" " * indent + (" " * gap).join(cells).rstrip())
    return lines


def no_wider_than(lines: Sequence[str], stream: TextIO) -> list[str]:
    """Lines of a table, cut at the width of a terminal: wrapped columns cannot be read. A file or a pipe gets all."""
    try:
        if not stream.isatty():
            return list(lines)
    except (OSError, ValueError, AttributeError):
        return list(lines)
    width = max(40, shutil.get_terminal_size().columns)
    return [line if len(line) <= width else f"{line[: width - 3].rstrip()}..." for line in lines]


def with_exit(text: str, code: int) -> str:
    """A closing line: what happened on the left, ``exit n`` on the right."""
    return f"{text.ljust(RIGHT)}exit {code}" if len(text) < RIGHT - 1 else f"{text}  exit {code}"


def shorten(names: Sequence[str], most: int = 4) -> str:
    """``a, b, c`` or ``a, b, c and 9 more``."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"
