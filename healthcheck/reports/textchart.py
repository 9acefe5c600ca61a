"""Charts in plain characters: a few lines of text that survive a log, a mail and a terminal without colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from healthcheck.core.text import number, step
from healthcheck.reports.charts import HEIGHT, WIDTH, Picture, Scale, scale_of

ROWS = 7
"""Lines of a drawing, without its axis."""
FEWEST = 6
"""Values from which on a drawing says more than a table."""
BARS = " .:-=+*#%@"
"""Heights of a sparkline where nothing but ASCII may be printed; see :func:`sparkline`."""
STEEP = 100.0
"""Ratio of the largest to the smallest value from which a sparkline shows logarithms."""
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def text_chart(picture: Picture, width: int) -> list[str]:
    """``*`` values, ``-`` the limit, ``.`` what was normal, ``x`` not finite, ``^`` where an alert fired.

    :param width: characters of a line. No lines come of fewer values than a picture needs.
    """
    main = picture.curves[0]
    if len(main.values) < FEWEST:
        return []
    scale = scale_of(picture)
    unit = picture.unit
    top = 10**scale.high if scale.log else scale.high
    bottom = 10**scale.low if scale.log else scale.low
    marks = [number(top, unit), number(bottom, unit)]
    margin = max(map(len, marks)) + 1
    columns = max(20, width - margin - 1)
    cells = [[" "] * columns for _ in range(ROWS)]
    for limit in picture.limits:
        if limit.value is not None:
            _put(cells, scale, limit.value, range(columns), "-")
        else:
            for at, value in zip(limit.steps, limit.values, strict=True):
                _put(cells, scale, value, [_column(scale, at, columns)], "-")
    for curve in picture.curves[1:]:
        if curve.style == "normal":
            for at, value in zip(curve.steps, curve.values, strict=True):
                _put(cells, scale, value, [_column(scale, at, columns)], ".")
    for place, values in _by_column(main.steps, main.values, scale, columns).items():
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            rows = sorted(_row(scale, value) for value in (min(finite), max(finite)))
            for row in range(rows[0], rows[1] + 1):
                cells[row][place] = "*" if row in rows else "|"
        if len(finite) < len(values):
            cells[-1][place] = "x"
    lines = []
    for n, line in enumerate(cells):
        label = marks[0] if n == 0 else marks[1] if n == ROWS - 1 else ""
        lines.append(f"{label.rjust(margin)}|{''.join(line).rstrip()}")
    first, last = picture.range
    begin, end = f"step {step(first)}", step(last)
    axis = [" "] * columns
    fired = [_column(scale, mark.first, columns) for mark in picture.marks if first <= mark.first <= last]
    for place in fired:
        axis[place] = "^"
    lines.append(f"{' ' * margin}+{''.join('-' if cell == ' ' else cell for cell in axis)}")
    room = columns - len(begin) - len(end)
    where = f"^ step {step(picture.marks[0].first)}" if fired else ""
    place = max(1, min(room - len(where) - 1, fired[0] - len(begin))) if fired else 0
    lines.append(f"{' ' * (margin + 1)}{begin}{(' ' * place + where).ljust(room)[:room]}{end}")
    kinds = [f"* {main.label}"]
    kinds += [f". {curve.label}" for curve in picture.curves[1:] if curve.style == "normal"]
    if picture.limits:
        known = {number(limit.value, unit) for limit in picture.limits if limit.value is not None}
        kinds.append(f"- limit {' and '.join(sorted(known))}".rstrip())
    if any("x" in row for row in cells):
        kinds.append("x not finite")
    log = "   (log scale)" if scale.log else ""
    return [f"{' ' * (margin + 1)}{'   '.join(kinds)}{log}", *lines]


def _row(scale: Scale, value: float) -> int:
    return max(0, min(ROWS - 1, int(scale.y(value) / HEIGHT * ROWS)))


def _column(scale: Scale, at: int, columns: int) -> int:
    return max(0, min(columns - 1, int(scale.x(at) / WIDTH * columns)))


def _put(cells: list[list[str]], scale: Scale, value: float, places: Sequence[int], sign: str) -> None:
    """One sign where a value is, if it is within the drawing."""
    if not math.isfinite(value) or not 0 <= scale.y(value) <= HEIGHT:
        return
    for place in places:
        cells[_row(scale, value)][place] = sign


def _by_column(steps: Sequence[int], values: Sequence[float], scale: Scale, columns: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for at, value in zip(steps, values, strict=True):
        found.setdefault(_column(scale, at, columns), []).append(value)
    return found


def sparkline(values: Sequence[float], width: int = 24, *, blocks: bool = True) -> str:
    """The course of a series in one line; ``x`` where a value was not finite. Empty without two values.

    :param blocks: with block characters, where the terminal has them.
    """
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    parts = [values[n * len(values) // count : (n + 1) * len(values) // count] for n in range(count)]
    means = [sum(part) / len(part) for part in parts]
    finite = sorted(mean for mean in means if math.isfinite(mean))
    if not finite:
        return "x" * count
    if finite[0] > 0 and finite[-1] / finite[0] >= STEEP:
        means = [math.log(mean) if math.isfinite(mean) else mean for mean in means]
        finite = [math.log(mean) for mean in finite]
    low, high = finite[0], finite[-1]
    signs = BLOCKS if blocks else BARS[1:]
    places = [
        "x" if not math.isfinite(mean) else signs[round((mean - low) / ((high - low) or 1.0) * (len(signs) - 1))]
        for mean in means
    ]
    return "".join(places)
