"""Charts as inline SVG: axes with units, grid, limits, what was normal, alerts, and the values under the pointer.

Nothing here is drawn by a script: a page that is opened on a login node, in a mail or in ten years shows the same. Words
are HTML beside the drawing, which stretches to the width of its column: so they stay legible on a telephone.
"""

from __future__ import annotations

import html
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from healthcheck.core.text import number, plural, step, visible_lines

WIDTH, HEIGHT = 1000, 300
"""View box of a chart; the page stretches it."""
COLUMNS = 120
"""Places along the steps that answer to the pointer."""
LOG_FROM = 30.0
"""Ratio of the largest to the median value from which positive values are drawn by their logarithms: the rest would be flat."""
SMOOTH_FROM = 300
"""Values from which on a noisy line is drawn faint, with its medians over it."""
FAR = 3.0
"""Ranges of the values that a limit may be away for the axis to reach it."""
NEAR = 10.0
"""The same as a factor, where the axis is logarithmic."""


def escape(text: str) -> str:
    """Text from anywhere as text of the page: no markup, and nothing that is not seen."""
    return html.escape(visible_lines(text))


@dataclass(slots=True)
class Curve:
    """One line of a chart."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    """May be non-finite: the line breaks there, and a mark says so."""
    style: str = "c0"
    """Class of the line: ``c0`` to ``c5``, ``normal``, ``other`` (another run)."""
    smooth: bool = False


@dataclass(slots=True)
class Limit:
    """Where a rule begins to complain: a level, or one that moves with what is normal."""

    label: str
    side: int
    """1: values above breach, -1: those below."""
    value: float | None = None
    steps: Sequence[int] = ()
    values: Sequence[float] = ()


@dataclass(slots=True)
class Mark:
    """An alert in a chart: from where to where, and what it says."""

    first: int
    last: int | None
    """None: to the end."""
    text: str
    severity: str = "error"
    target: str = ""
    """Id of what is behind it."""


@dataclass(slots=True)
class Picture:
    """All that a chart shows; drawn as SVG here and by :mod:`healthcheck.reports.interactive`."""

    title: str
    curves: list[Curve]
    unit: str = ""
    limits: list[Limit] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    note: str = ""
    tall: bool = False
    first: int | None = None
    """First and last step of the axis; those of the values if not given."""
    last: int | None = None
    part: bool = False
    """Whether it shows a part of the run only."""
    level_words: str = ""
    """The limit in words, where it cannot be drawn."""

    @property
    def range(self) -> tuple[int, int]:
        firsts = [curve.steps[0] for curve in self.curves if len(curve.steps)]
        lasts = [curve.steps[-1] for curve in self.curves if len(curve.steps)]
        return (
            self.first if self.first is not None else min(firsts, default=0),
            self.last if self.last is not None else max(lasts, default=1),
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """From steps and values to places in the view box."""

    first: float
    last: float
    low: float
    high: float
    log: bool = False

    def x(self, at: float) -> float:
        return (at - self.first) / ((self.last - self.first) or 1) * WIDTH

    def y(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        part = 0.5 if self.high == self.low else (self.high - value) / (self.high - self.low)
        return min(1.02, max(-0.02, part)) * HEIGHT


def scale_of(picture: Picture) -> Scale:
    """The axes that show every finite value, and each limit that is not far away."""
    first, last = picture.range
    values = [v for curve in picture.curves for v in curve.values if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    log = low > 0 and high / median(values) >= LOG_FROM
    spread = (high - low) or abs(high) or 1.0
    # A limit that is far from all values would press them into a flat line: it is drawn where it is near them.
    least, most = (low / NEAR, high * NEAR) if log else (low - FAR * spread, high + FAR * spread)
    near = [level for level in levels_of(picture) if least <= level <= most]
    low, high = min([low, *near]), max([high, *near])
    if log:
        low, high = math.log10(low), math.log10(high)
    else:
        # A value that hardly changes should look like one: at least two hundredths of its size.
        missing = (0.02 * max(abs(low), abs(high)) - (high - low)) / 2
        low, high = (low - missing, high + missing) if missing > 0 else (low, high)
    room = 0.06 * (high - low) or 0.5
    floor = 0.0 if not log and low >= 0 and low - room < 0 else low - room
    return Scale(first, last if last > first else first + 1, floor, high + room, log)


def levels_of(picture: Picture) -> list[float]:
    """Values of all limits that are numbers; of a limit that moves those around an alert."""
    made = [limit.value for limit in picture.limits if limit.value is not None and math.isfinite(limit.value)]
    first, last = picture.range
    near = 0.1 * (last - first)
    for limit in picture.limits:
        here = [
            value
            for at, value in zip(limit.steps, limit.values, strict=True)
            if math.isfinite(value) and any(mark.first - near <= at <= mark.first for mark in picture.marks)
        ]
        made += here or [value for value in limit.values if math.isfinite(value)]
    return made


def ticks(scale: Scale, unit: str, most: int = 5) -> list[float]:
    """Round numbers along the values."""
    if scale.log:
        decades = range(math.floor(scale.low), math.ceil(scale.high) + 1)
        if len(decades) > most + 1:
            decades = range(decades[0], decades[-1] + 1, math.ceil(len(decades) / most))
        digits = (1, 2, 5) if scale.high - scale.low < 2 else (1,)
        made = [digit * 10.0**n for n in decades for digit in digits]
        return [value for value in made if scale.low <= math.log10(value) <= scale.high]
    return _round_numbers(scale.low, scale.high, most, base=2.0 if unit == "bytes" else 10.0)


def _round_numbers(low: float, high: float, most: int, *, base: float = 10.0) -> list[float]:
    spread = high - low
    if spread <= 0 or not math.isfinite(spread):
        return [low]
    if base == 2.0:
        gap = 2.0 ** math.ceil(math.log2(spread / most))
    else:
        power = 10.0 ** math.floor(math.log10(spread / most))
        gap = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= spread / most)
    begin = math.ceil(low / gap)
    return [n * gap for n in range(begin, math.floor(high / gap) + 1)]


def step_ticks(scale: Scale, most: int = 6) -> list[int]:
    return [int(value) for value in _round_numbers(scale.first, scale.last, most) if value == int(value)]


def tick_text(value: float, unit: str, gap: float) -> str:
    """A tick with as many digits as it takes to tell it from its neighbours."""
    if unit:
        return number(value, unit)
    if value and gap and abs(value) < 1e6 and gap >= 1e-4:
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        return f"{value:,.{digits}f}"
    return number(value)


def described(picture: Picture) -> str:
    """The numbers of a chart in words, for its caption and for people who do not see it."""
    unit = picture.unit
    main = picture.curves[0]
    finite = [value for value in main.values if math.isfinite(value)]
    broken = [at for at, value in zip(main.steps, main.values, strict=True) if not math.isfinite(value)]
    said = f"{number(min(finite), unit)} to {number(max(finite), unit)}" if finite else "no finite value"
    if len(main.values):
        said += f", last {number(main.values[-1], unit)}"
    if scale_of(picture).log:
        said += ", log scale"
    if broken:
        said += f", {plural(len(broken), 'value')} not finite from step {step(broken[0])}"
    if picture.part:
        said += f", steps {step(picture.range[0])} to {step(picture.range[1])}"
    if picture.level_words:
        said += f", limit {picture.level_words}"
    return said + (f"; {picture.note}" if picture.note else "")


def chart(picture: Picture, *, key: str = "") -> str:
    """One chart with its caption as a ``figure`` element.

    :param key: id of the drawing, under which a script finds it.
    """
    scale = scale_of(picture)
    said = described(picture)
    drawn: list[str] = []
    words: list[str] = []
    drawn += _grid(scale, picture.unit, words)
    drawn += _spans(picture.marks, scale)
    for limit in picture.limits:
        drawn += _limit(limit, scale, picture.unit, words)
    broken: set[int] = set()
    for curve in sorted(picture.curves, key=lambda curve: curve.style not in ("normal", "other")):
        drawn += _curve(curve, scale)
        broken |= {at for at, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)}
    drawn += _broken(broken, scale, picture.curves, words)
    drawn += _marks(picture.marks, scale, words)
    drawn += _under_the_pointer(picture, scale)
    title = escape(picture.title)
    named = (
        "".join(f'<span class="key {curve.style}">{escape(curve.label)}</span>' for curve in picture.curves)
        if len(picture.curves) > 1
        else ""
    )
    first, last = picture.range
    live = f'<div class=live-chart id="{key}-live"></div>' if key else ""
    return (
        f'<figure class="chart{" tall" if picture.tall else ""}"><figcaption><b>{title}</b> {named}'
        f"<span class=said>{escape(said)}</span></figcaption>"
        f"<div class=plot{f' id={key}' if key else ''}><div class=area>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{title}, steps {step(first)} to {step(last)}: {escape(said)}">{"".join(drawn)}</svg>'
        f"{''.join(words)}</div>{live}</div></figure>"
    )


def _grid(scale: Scale, unit: str, words: list[str]) -> list[str]:
    values = ticks(scale, unit)
    gap = values[1] - values[0] if len(values) > 1 else 0.0
    lines = []
    for value in values:
        y = scale.y(value)
        lines.append(f"M0 {y:.1f}H{WIDTH}")
        text = number(value, unit) if scale.log else tick_text(value, unit, gap)
        words.append(f'<span class=yt style="top:{y / HEIGHT:.2%}">{escape(text)}</span>')
    places = step_ticks(scale)
    for n, at in enumerate(places):
        x = scale.x(at)
        lines.append(f"M{x:.1f} 0V{HEIGHT}")
        edge = " edge" if x > 0.94 * WIDTH else " first" if x < 0.03 * WIDTH else ""
        few = " few" if n % 2 else ""
        words.append(f'<span class="xt{edge}{few}" style="left:{x / WIDTH:.2%}">{step(at)}</span>')
    words.append("<span class=xn>step</span>")
    return [f'<path class="grid" d="{"".join(lines)}"/>'] if lines else []


def _curve(curve: Curve, scale: Scale) -> list[str]:
    """The line, broken where a value is not finite; a value that stands alone is a dot."""
    raw: list[str] = []
    mean: list[str] = []
    noisy = curve.smooth and sum(map(math.isfinite, curve.values)) >= SMOOTH_FROM
    for steps, values in _stretches(curve.steps, curve.values):
        kept = thinned(steps, values)
        raw.append(_path([(scale.x(steps[i]), scale.y(values[i])) for i in kept]))
        if noisy and len(values) > 20:
            places = max(2, len(values) * 120 // len(curve.values))
            usual = zip(*medians(steps, values, places), strict=True)
            mean.append(_path([(scale.x(at), scale.y(value)) for at, value in usual]))
    faint = " faint" if mean else ""
    made = [f'<path class="line {curve.style}{faint}" d="{"".join(raw)}"/>'] if raw else []
    return made + ([f'<path class="line {curve.style}" d="{"".join(mean)}"/>'] if mean else [])


def _stretches(steps: Sequence[int], values: Sequence[float]) -> Iterable[tuple[list[int], list[float]]]:
    """Runs of finite values."""
    xs: list[int] = []
    ys: list[float] = []
    for at, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            xs.append(at)
            ys.append(value)
        elif xs:
            yield xs, ys
            xs, ys = [], []
    if xs:
        yield xs, ys


def _path(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:
        return f"M{points[0][0]:.1f} {points[0][1]:.1f}h0"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _limit(limit: Limit, scale: Scale, unit: str, words: list[str]) -> list[str]:
    """The line of a limit, and the side of it on which values breach."""
    if limit.value is not None:
        y = scale.y(limit.value)
        if not -1 <= y <= HEIGHT + 1:
            return []
        top, bottom = (0.0, y) if limit.side > 0 else (y, float(HEIGHT))
        text = f"{limit.label} {number(limit.value, unit)}"
        words.append(f'<span class="tag lim" style="top:{y / HEIGHT:.2%}">{escape(text)}</span>')
        title = f"<title>{escape(text)}</title>"
        return [
            f'<rect class="beyond" x="0" y="{top:.1f}" width="{WIDTH}" height="{max(0.0, bottom - top):.1f}"/>',
            f'<path class="limit" d="M0 {y:.1f}H{WIDTH}">{title}</path>',
        ]
    stretches = list(_stretches(limit.steps, limit.values))
    if not stretches:
        return []
    paths = []
    for steps, values in stretches:
        kept = thinned(steps, values, 300)
        paths.append(_path([(scale.x(steps[i]), scale.y(values[i])) for i in kept]))
    inside = [(at, scale.y(value)) for steps, values in stretches for at, value in zip(steps, values, strict=True)]
    inside = [(at, y) for at, y in inside if 0 <= y <= HEIGHT]
    if inside:
        at, y = inside[-1]
        right = max(0.2, 100 - scale.x(at) / WIDTH * 100)
        words.append(
            f'<span class="tag lim" style="top:{y / HEIGHT:.2%};right:{right:.1f}%">{escape(limit.label)}</span>'
        )
    return [f'<path class="limit" d="{"".join(paths)}"><title>{escape(limit.label)}</title></path>']


def _spans(marks: Sequence[Mark], scale: Scale) -> list[str]:
    made = []
    for mark in marks:
        begin, end = scale.x(mark.first), scale.x(mark.last) if mark.last is not None else WIDTH
        if end > 0 and begin < WIDTH:
            begin, end = max(0.0, begin), min(float(WIDTH), max(end, begin + 1))
            made.append(
                f'<rect class="span {escape(mark.severity)}" x="{begin:.1f}" y="0" width="{end - begin:.1f}" height="{HEIGHT}"/>'
            )
    return made


def _marks(marks: Sequence[Mark], scale: Scale, words: list[str]) -> list[str]:
    made = []
    for mark in marks:
        x = scale.x(mark.first)
        if not -1 <= x <= WIDTH + 1:
            continue
        made.append(f'<path class="mark {escape(mark.severity)}" d="M{x:.1f} 0V{HEIGHT}"/>')
        if len(marks) == 1:
            side = "right" if x < 0.6 * WIDTH else "left"
            text = f"fired at step {step(mark.first)}"
            words.append(f'<span class="tag at {side}" style="left:{x / WIDTH:.2%}">{escape(text)}</span>')
    return made


def _broken(broken: set[int], scale: Scale, curves: Sequence[Curve], words: list[str]) -> list[str]:
    """Values that are not finite: one mark a place along the steps, so that a run that stays broken is a bounded page."""
    if not broken:
        return []
    places = sorted({round(scale.x(at) / WIDTH * COLUMNS * 2) for at in broken})
    kinds = {number(v) for curve in curves for v in curve.values if not math.isfinite(v)}
    x = scale.x(min(broken))
    side = "right" if x < 0.7 * WIDTH else "left"
    words.append(f'<span class="tag nf {side}" style="left:{x / WIDTH:.2%}">{escape(", ".join(sorted(kinds)))}</span>')
    drawn = "".join(f"M{n * WIDTH / COLUMNS / 2:.1f} {HEIGHT}v-{HEIGHT // 12}" for n in places)
    return [f'<path class="broken" d="{drawn}"/>']


def _under_the_pointer(picture: Picture, scale: Scale) -> list[str]:
    """A column for each place along the steps, with the values that are there."""
    first, last = scale.first, scale.last
    columns = int(min(COLUMNS, max(1, last - first + 1)))
    found: list[dict[str, tuple[int, int, Sequence[float]]]] = [{} for _ in range(columns)]
    for curve in picture.curves:
        begin = bisect_left(curve.steps, first)
        for n in range(columns):
            end = (
                bisect_left(curve.steps, first + (n + 1) * (last - first) / columns)
                if n < columns - 1
                else len(curve.steps)
            )
            if end > begin:
                found[n][curve.label] = (curve.steps[begin], curve.steps[end - 1], curve.values[begin:end])
            begin = end
    made = []
    width = WIDTH / columns
    for n, values in enumerate(found):
        if not values:
            continue
        begin = min(known[0] for known in values.values())
        end = max(known[1] for known in values.values())
        head = f"step {step(begin)}" if begin == end else f"steps {step(begin)} to {step(end)}"
        shown = [f"{label}: {_range_text(known[2], picture.unit)}" for label, known in values.items()]
        shown += [mark.text for mark in picture.marks if begin <= mark.first <= end]
        title = escape(head) + "".join(f"&#10;{escape(line)}" for line in shown)
        made.append(
            f'<rect class="h" x="{n * width:.1f}" y="0" width="{width:.1f}" height="{HEIGHT}"><title>{title}</title></rect>'
        )
    return made


def _range_text(values: Sequence[float], unit: str) -> str:
    """``2.31`` or ``1.9 to 2.8``; what is not finite is always named."""
    total = sum(values)
    if total - total == 0.0:  # all of them are finite
        low, high = number(min(values), unit), number(max(values), unit)
        return low if low == high else f"{low} to {high}"
    finite = [value for value in values if math.isfinite(value)]
    parts = []
    if finite:
        low, high = number(min(finite), unit), number(max(finite), unit)
        parts.append(low if low == high else f"{low} to {high}")
    parts += sorted({number(value) for value in values if not math.isfinite(value)})
    return ", ".join(parts)


def marks_of(alerts: Iterable[Mapping[str, Any]], prefix: str = "") -> list[Mark]:
    """The alerts of a report as marks, without those that others explain."""
    return [
        Mark(
            int(alert["fired_step"]),
            int(alert["cleared_step"]) if alert.get("cleared_step") is not None else None,
            f"{alert['rule']} fired at step {step(alert['fired_step'])}",
            str(alert["severity"]),
            f"{prefix}{alert['rule']}-{alert['number']}",
        )
        for alert in alerts
        if not alert.get("explained_by")
    ]


# --------------------------------------------------------------------------------------------------
# Fewer points of a series for a picture of it: none that a reader would miss.
#
# Largest-Triangle-Three-Buckets (Steinarsson, 2013, https://hdl.handle.net/1946/15343) over the lowest and highest points of
# small buckets (Van Der Donckt et al., MinMaxLTTB, 2023, arXiv:2305.00332). The extremes of coarser buckets are kept whatever
# the triangles say, so that a spike of one sample stays. Values that are not finite are no points of a line: callers
# draw them apart.


POINTS = 600
"""Points of a line in a picture: about two for each pixel column that a reader can tell apart."""
COARSE = 150
"""Buckets of which the extremes are kept in any case."""
FINE = 4
"""Points per point of the result that the triangles choose from."""


def thinned(xs: Sequence[float], ys: Sequence[float], points: int = POINTS) -> list[int]:
    """Indices of the points to draw, in order; all of them where there are few.

    :param xs: ascending; ``ys``: finite.
    """
    count = len(xs)
    if count <= points:
        return list(range(count))
    chosen = extremes(ys, range(count), points * FINE // 2)
    kept = {0, count - 1, *largest_triangles(xs, ys, chosen, points)}
    kept.update(extremes(ys, chosen, COARSE))  # those of the whole are among those of the parts
    return sorted(kept)


def extremes(ys: Sequence[float], among: Sequence[int], buckets: int) -> list[int]:
    """Indices of the lowest and the highest value of each bucket, in order."""
    count = len(among)
    kept: list[int] = []
    for n in range(buckets):
        part = among[n * count // buckets : (n + 1) * count // buckets]
        if len(part):
            low, high = min(part, key=ys.__getitem__), max(part, key=ys.__getitem__)
            kept += [low] if low == high else [low, high] if low < high else [high, low]
    return kept


def largest_triangles(xs: Sequence[float], ys: Sequence[float], among: Sequence[int], points: int) -> list[int]:
    """LTTB: of each bucket the point that makes the largest triangle with the one before and the mean of the next."""
    count = len(among)
    if count <= points or points < 3:
        return list(among)
    size = (count - 2) / (points - 2)
    kept = [among[0]]
    for n in range(points - 2):
        here = among[int(n * size) + 1 : int((n + 1) * size) + 1]
        after = among[int((n + 1) * size) + 1 : int((n + 2) * size) + 1] or among[-1:]
        mean_x = sum(xs[i] for i in after) / len(after)
        mean_y = sum(ys[i] for i in after) / len(after)
        x, y = xs[kept[-1]], ys[kept[-1]]
        across, along = mean_y - y, x - mean_x
        kept.append(max(here, key=lambda i: abs((xs[i] - x) * across + (ys[i] - y) * along)))
    kept.append(among[-1])
    return kept


def medians(xs: Sequence[float], ys: Sequence[float], places: int = COARSE) -> tuple[list[float], list[float]]:
    """The usual course of a noisy series: the median of each of so many places, which no single value can move."""
    count = len(xs)
    places = min(places, count)
    at, usual = [], []
    for n in range(places):
        begin, end = n * count // places, (n + 1) * count // places
        part = sorted(ys[begin:end])
        at.append((xs[begin] + xs[end - 1]) / 2)
        usual.append(part[len(part) // 2] if len(part) % 2 else (part[len(part) // 2 - 1] + part[len(part) // 2]) / 2)
    return at, usual
