"""Drawings beside charts: the strip of what happened when, the heat map of layers, the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from healthcheck.core.text import number, plural, step
from healthcheck.reports.charts import Mark, Scale, escape, step_ticks
from healthcheck.reports.recorded import Recorded, Series

PARTS = ("data", "forward", "backward", "optimizer")
"""Metrics ``time.PART``; what is left of ``time.step`` is the rest."""
CELLS = 72
"""Places along the steps of a heat map."""
LAYERS = 48
"""Rows of a heat map; of more the ones with values that are not finite, then those that move most."""
SHADES = 8
"""Colours of a heat map."""


# --------------------------------------------------------------------------------------------------
# What happened when: one lane each for alerts, checkpoints, evaluations and restarts.


def timeline(
    first: int, last: int, marks: Sequence[Mark], events: Mapping[str, Sequence[int]], *, seconds: str = ""
) -> str:
    """The strip, as a ``section``.

    :param events: name of a lane -> steps.
    """
    scale = Scale(first, max(last, first + 1), 0, 1)
    lanes = []
    worst = {"error": 0, "warning": 1}
    if marks:
        drawn = []
        for mark in sorted(marks, key=lambda mark: -worst.get(mark.severity, 2)):
            begin = scale.x(mark.first) / 10
            end = scale.x(mark.last) / 10 if mark.last is not None else 100.0
            until = f" to {step(mark.last)}" if mark.last is not None else ", not cleared"
            title = escape(f"{mark.text}{until}")
            drawn.append(
                f'<a class="ev {escape(mark.severity)}" href="#{escape(mark.target)}" title="{title}" '
                f'style="left:{begin:.2f}%;width:{max(0.0, end - begin):.2f}%"><span>{title}</span></a>'
            )
        lanes.append(("alerts", "".join(drawn), len(marks)))
    for name, steps in events.items():
        if not steps:
            continue
        shown = _apart(steps, scale)
        drawn = [
            f'<i class="ev {escape(name.replace(" ", "-"))}" title="{escape(_at(name, group))}" '
            f'style="left:{scale.x(group[0]) / 10:.2f}%"></i>'
            for group in shown
        ]
        lanes.append((name, "".join(drawn), len(steps)))
    rows = "".join(
        f"<div class=lane><span class=ln>{escape(name)} <small>{count:,}</small></span><span class=lb>{drawn}</span></div>"
        for name, drawn, count in lanes
    )
    axis = "".join(
        f'<span class="xt{" few" if n % 2 else ""}{" edge" if scale.x(at) > 940 else ""}" '
        f'style="left:{scale.x(at) / 10:.2f}%">{step(at)}</span>'
        for n, at in enumerate(step_ticks(scale))
    )
    words = f"steps {step(first)} to {step(last)}" + (f", {seconds}" if seconds else "")
    return (
        f'<section class=strip aria-label="{escape(f"what happened when, {words}")}">{rows}'
        f"<div class=lane><span class=ln>step</span><span class='lb ax'>{axis}</span></div></section>"
    )


def _apart(steps: Sequence[int], scale: Scale) -> list[list[int]]:
    """Steps that would be drawn on one another, together."""
    groups: list[list[int]] = []
    for at in sorted(steps):
        if groups and scale.x(at) - scale.x(groups[-1][0]) < 4:
            groups[-1].append(at)
        else:
            groups.append([at])
    return groups


def _at(name: str, steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"{name.removesuffix('s')} at step {step(steps[0])}"
    return f"{len(steps)} {name}, steps {step(steps[0])} to {step(steps[-1])}"


# --------------------------------------------------------------------------------------------------
# Layers over time: one row for each, its values against the usual one of all.


def heat_map(title: str, series: Sequence[Series], *, bad: Sequence[str] = (), unit: str = "") -> str:
    """A metric by layer, tensor or rank over time as a ``figure``; empty where there are fewer than two of them.

    The colour is the logarithm of the value; what is not finite has a colour and a sign of its own.

    :param bad: layers or tensors that an alert has named: they come first, and are marked.
    """
    rows = _rows(series, bad)
    if len(rows) < 2:
        return ""
    first = min(one.steps[0] for one in rows)
    last = max(one.steps[-1] for one in rows)
    cells = [_cells(one, first, last) for one in rows]
    sizes = [math.log10(abs(v)) for row in cells for cell in row for v in cell[:1] if v and math.isfinite(v)]
    low, high = (min(sizes), max(sizes)) if sizes else (0.0, 1.0)
    high = high if high > low else low + 1.0
    drawn, names = [], []
    columns = len(cells[0])
    width = 1000 / columns
    for n, (one, row) in enumerate(zip(rows, cells, strict=True)):
        marked = _is_bad(one.parameter, bad)
        # A row is one path for each colour, and only cells worth a word answer to the pointer.
        names.append(f'<span class="hn{" bad" if marked else ""}" title="{escape(one.row)}">{escape(one.row)}</span>')
        for column, cell in enumerate(row):
            value, begin, end = cell
            if value is None:
                continue
            shade = "hx" if not math.isfinite(value) else f"h{_shade(value, low, high)}"
            at = f"step {step(begin)}" if begin == end else f"steps {step(begin)} to {step(end)}"
            shown = escape(f"{one.row}, {at}: {number(value, unit)}")
            drawn.append(
                f'<rect class="{shade}" x="{column * width:.1f}" y="{n * 10}" width="{width + 0.2:.1f}" height="10">'
                f"<title>{shown}</title></rect>"
            )
    left = len(series) - len(rows)
    said = f"{plural(len(rows), 'row')}, steps {step(first)} to {step(last)}; largest value of each cell"
    said += f"; {left:,} more, which move less" if left else ""
    steps = [10.0 ** (low + (high - low) * n / (SHADES - 1)) for n in (0, (SHADES - 1) // 2, SHADES - 1)]
    legend = "".join(f'<i class="h{n}"></i>' for n in range(SHADES))
    words = f"<span class=scale>{escape(number(steps[0], unit))} {legend} {escape(number(steps[2], unit))} <i class=hx></i> not finite</span>"
    return (
        f'<figure class="heat"><figcaption><b>{escape(title)}</b> {words}<span class=said>{escape(said)}</span></figcaption>'
        f'<div class=heatmap style="--rows:{len(rows)}"><div class=hns>{"".join(names)}</div>'
        f'<svg viewBox="0 0 1000 {10 * len(rows)}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(f"{title} by layer: {said}")}">{"".join(drawn)}</svg></div></figure>'
    )


def _rows(series: Sequence[Series], bad: Sequence[str]) -> list[Series]:
    """In the order of the model; of too many the ones that matter."""
    known = [one for one in series if len(one.values)]
    if len(known) <= LAYERS:
        return known

    def matters(one: Series) -> tuple[bool, bool, float]:
        finite = sorted(abs(v) for v in one.values if math.isfinite(v) and v)
        moves = math.log10(finite[-1] / finite[0]) if finite else 0.0
        return _is_bad(one.parameter, bad), len(finite) < len(one.values), moves

    chosen = {id(one) for one in sorted(known, key=matters, reverse=True)[:LAYERS]}
    return [one for one in known if id(one) in chosen]


def _is_bad(name: str, bad: Sequence[str]) -> bool:
    return any(name == one or one.startswith(f"{name}.") for one in bad)


def _cells(one: Series, first: int, last: int) -> list[tuple[float | None, int, int]]:
    """The largest value of each place along the steps, and from where to where; one that is not finite is the largest."""
    columns = min(CELLS, last - first + 1)
    cells: list[tuple[float | None, int, int]] = [(None, 0, 0)] * columns
    for at, value in zip(one.steps, one.values, strict=True):
        n = min(columns - 1, (at - first) * columns // max(1, last - first + 1))
        known, begin, _ = cells[n]
        if known is None:
            cells[n] = (value, at, at)
        else:
            larger = known if not math.isfinite(known) or (math.isfinite(value) and abs(value) <= abs(known)) else value
            cells[n] = (larger, begin, at)
    # Looks come every so many steps: a cell without one shows the last.
    for n in range(1, columns):
        if cells[n][0] is None:
            cells[n] = cells[n - 1]
    return cells


def _shade(value: float, low: float, high: float) -> int:
    if not value:
        return 0
    return max(0, min(SHADES - 1, round((math.log10(abs(value)) - low) / (high - low) * (SHADES - 1))))


# --------------------------------------------------------------------------------------------------
# What a step's time goes to.


def step_parts(record: Recorded, performance: Mapping[str, Any]) -> str:
    """The mean step as one bar, and its course over the run; empty where nothing of it was measured."""
    means = dict(performance.get("step") or {})
    whole = record.series.get("time.step")
    if whole is None or len(whole.values) < 3:
        return ""
    if not means:
        means = {"seconds": median(v for v in whole.values if math.isfinite(v))}
    parts = [name for name in PARTS if f"time.{name}" in record.series]
    if not parts:
        return ""
    total = float(means.get("seconds") or 0.0)
    known = [(name, float(means[name])) for name in parts if name in means]
    known.append(("other", max(0.0, total - sum(value for _, value in known))))
    bar = "".join(
        f'<span class="part p-{name}" style="width:{value / total:.2%}" title="{name}: {number(value, "s")}, {value / total:.0%}">'
        f"<b>{name if value / total > 0.12 else ''}</b></span>"
        for name, value in known
        if total and value / total >= 0.001
    )
    words = ", ".join(f"{name} {value / total:.0%}" for name, value in known) if total else ""
    said = f"{number(total, 's')} a step: {words}"
    return (
        f"<figure class=parts><figcaption><b>where a step's time goes</b> "
        f"<span class=said>{escape(said)}</span></figcaption>"
        f"<div class=bar>{bar}</div>{_course(record, whole, parts)}</figure>"
    )


def _course(record: Recorded, whole: Series, parts: Sequence[str]) -> str:
    """Stacked columns over the steps: the mean time of each part in each of them."""
    first, last = whole.steps[0], whole.steps[-1]
    columns = min(60, last - first + 1)

    def means(series: Series) -> list[float | None]:
        sums, counts = [0.0] * columns, [0] * columns
        for at, value in zip(series.steps, series.values, strict=True):
            if math.isfinite(value) and first <= at <= last:
                n = (at - first) * columns // (last - first + 1)
                sums[n] += value
                counts[n] += 1
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    wholes = means(whole)
    of_part = {name: means(record.series[f"time.{name}"]) for name in parts}
    top = max((value for value in wholes if value), default=0.0)
    if not top:
        return ""
    drawn = []
    width = 1000 / columns
    for n, value in enumerate(wholes):
        if value is None:
            continue
        y, shown, used = 100.0, [], 0.0
        shares = [(name, of_part[name][n] or 0.0) for name in parts]
        shares.append(("other", max(0.0, value - sum(seconds for _, seconds in shares))))
        bars = []
        for name, seconds in shares:
            seconds = min(seconds, value - used)
            used += seconds
            height = seconds / top * 100
            y -= height
            shown.append(f"{name} {number(seconds, 's')}")
            bars.append(
                f'<rect class="p-{name}" x="{n * width:.1f}" y="{y:.1f}" width="{width * 0.92:.1f}" height="{height:.1f}"/>'
            )
        at = first + n * (last - first + 1) // columns
        title = f"from step {step(at)}: {number(value, 's')} a step, " + ", ".join(shown)
        drawn.append(f"<g>{''.join(bars)}<title>{escape(title)}</title></g>")
    return (
        f'<div class=plot><div class="area low"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="seconds of a step over the run">{"".join(drawn)}</svg>'
        f"<span class=yt style='top:0%'>{escape(number(top, 's'))}</span><span class=yt style='top:100%'>0</span>"
        f"<span class=xt style='left:0%'>{step(first)}</span><span class='xt edge' style='left:100%'>{step(last)}</span></div></div>"
    )
