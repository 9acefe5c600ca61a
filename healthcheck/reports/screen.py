"""What the live view and ``healthcheck top`` show of a run: a screen of text of any width, made of its newest values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from healthcheck.core.text import number, plural, step, time_left, visible, wrapped
from healthcheck.reports.recorded import FIRST, NEXT
from healthcheck.reports.textchart import sparkline

ROWS = (*(name for name in FIRST if name not in ("loss", "eval.loss")), *NEXT)
"""Metrics that everybody's runs have, in the order of the screen; those that the script logs come after them."""
OWN_ROWS = 8
"""Metrics of the script's own that are shown."""
MOST_ALERTS = 3
NARROWEST = 38
WIDEST = 110
Values = Sequence[tuple[int, float]]


@dataclass(slots=True)
class Screen:
    """The state of one run at one moment."""

    name: str
    status: str
    at: int
    """The newest step."""
    series: Mapping[str, Values] = field(default_factory=dict)
    """Name of a series -> its newest values as (step, value), oldest first."""
    units: Mapping[str, str] = field(default_factory=dict)
    alerts: Sequence[Mapping[str, Any]] = ()
    """As in ``report.json``."""
    pressing: Sequence[str] = ()
    """Rules that fire or are about to, in words."""
    planned: int = 0
    """Steps of the whole run; 0: nobody knows."""
    capacity: int = 0
    """Bytes of memory that the run may use; 0: nobody knows."""
    beside: str = ""
    """What is worth a word in the first line."""
    blocks: bool = True
    """Whether the terminal has block characters."""


def screen_lines(screen: Screen, width: int) -> list[str]:
    """All lines, none longer than ``width`` (38 at least)."""
    width = max(NARROWEST, min(WIDEST, width))
    lines = wrapped(f"{visible(screen.name)}: {screen.status}, step {step(screen.at)}{screen.beside}", width, "  ", "")
    lines += _progress(screen, width)
    lines += ["", *_losses(screen, width), *_table(screen, width)]
    if not screen.series:
        lines.append("  no samples yet")
    if screen.pressing:
        lines += ["", *wrapped(f"watch: {'; '.join(screen.pressing)}", width, "       ", "")]
    return [line.rstrip() for line in [*lines, "", *_alerts(screen, width)]]


def _newest(screen: Screen, name: str) -> float | None:
    values = screen.series.get(name)
    return values[-1][1] if values else None


def _progress(screen: Screen, width: int) -> list[str]:
    """A bar, the part that is done and the time left, as far as anybody knows."""
    part, left = _newest(screen, "progress"), _newest(screen, "eta")
    if screen.planned:
        part = screen.at / screen.planned
    if part is None or not math.isfinite(part):
        return []
    if left is None and (pace := [v for _, v in screen.series.get("time.step", ()) if math.isfinite(v)]) and part > 0:
        left = median(pace) * (screen.at / part - screen.at)
    part = min(1.0, max(0.0, part))
    words = f" {part:4.0%}" + (f"  {time_left(left)} left" if left is not None and math.isfinite(left) else "")
    return [f"{_bar(part, width - len(words) - 2, screen.blocks)}{words}"]


def _bar(part: float, width: int, blocks: bool) -> str:
    width = max(8, min(60, width))
    full = round(part * width)
    return ("\u2588" * full + "\u2591" * (width - full)) if blocks else f"[{'#' * full}{'-' * (width - full)}]"


def _losses(screen: Screen, width: int) -> list[str]:
    """The loss with its course, and the held-out loss with its step."""
    lines = []
    values = screen.series.get("loss")
    if values:
        shown = number(values[-1][1])
        course = sparkline([value for _, value in values], max(8, min(48, width - 26)), blocks=screen.blocks)
        lines.append(f"{'loss':<14}{shown:>10}  {course}")
    held = screen.series.get("eval.loss")
    if held:
        at, value = held[-1]
        best = min((v for _, v in held if math.isfinite(v)), default=value)
        line = f"{'held-out loss':<14}{number(value):>10}  step {step(at)}"
        more = f"{line}, best {number(best)}"
        lines.append(more if len(more) <= width else line[:width])
    return lines


def _table(screen: Screen, width: int) -> list[str]:
    """One line for each metric: newest value, the usual one, the course. Constants and signs of our own are left out."""
    lines = []
    known = [name for name in ROWS if name in screen.series]
    own = [
        name
        for name, values in screen.series.items()
        if name.partition("[")[0] not in screen.units
        and "[" not in name
        and name != "eval.loss"
        and (len(values) == 1 or _moves(values))
    ]
    listed = dict.fromkeys([*known, *own[:OWN_ROWS]])
    names = {name: visible(name) for name in listed}
    wide = min(24, max([13, *map(len, names.values())])) + 1
    for name in listed:
        values = screen.series[name]
        unit = screen.units.get(name.partition("[")[0], "")
        newest = number(values[-1][1], unit)
        finite = [value for _, value in values if math.isfinite(value)]
        usual = f"usual {number(median(finite), unit)}" if len(finite) > 2 and _moves(values) else ""
        line = f"{names[name][: wide - 1]:<{wide}}{newest:>{24 - min(wide, 14)}}  {usual:<17}"
        if name == "memory.allocated" and screen.capacity and len(line) + 17 <= width:
            line += " " + _bar(min(1.0, values[-1][1] / screen.capacity), 14, screen.blocks)
        elif (room := width - len(line) - 1) >= 8 and _moves(values):
            line += " " + sparkline([value for _, value in values], min(24, room), blocks=screen.blocks)
        if len(line.rstrip()) > width:  # the newest value alone
            line = line[: len(line) - 19]
        lines.append(line.rstrip()[:width])
    wait = _wait(screen)
    if wait:
        lines.append(f"{'waits for data':<{wide}} {wait}")
    return lines


def _wait(screen: Screen) -> str:
    """The part of the time that steps wait for their batch."""
    steps = dict(screen.series.get("time.step", ()))
    waits = [(at, value) for at, value in screen.series.get("time.data", ()) if at in steps]
    total = sum(steps[at] for at, _ in waits)
    return f"{sum(value for _, value in waits) / total:.0%} of the time" if total else ""


def _moves(values: Values) -> bool:
    return any(value != values[0][1] for _, value in values)


def _alerts(screen: Screen, width: int) -> list[str]:
    """How many there were, and the last ones with what to try."""
    shown = [alert for alert in screen.alerts if not alert.get("explained_by")]
    lines = [plural(len(shown), "alert") + (": healthcheck why" if shown else "")]
    for alert in shown[-MOST_ALERTS:]:
        head = f"{alert['severity']} {alert['rule']}, step {step(alert['fired_step'])}: {alert.get('message', '')}"
        lines += wrapped(f"  {head}", width, "    ", "")[:2]
        if alert.get("hint"):
            lines += wrapped(f"    try: {alert['hint']}", width, "      ", "")[:2]
    return lines
