"""Small line charts as inline SVG: one series over the steps of a run, with the steps of alerts marked.

Nothing here is drawn by a script: a page that is opened on a login node, in a mail or in ten years shows the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from healthcheck.reports.record.samplelines import Batch, read_samples
from healthcheck.reports.text import number, plural, step
from healthcheck.samples import series_name

WIDTH, HEIGHT = 320.0, 96.0
"""View box of one chart; the page scales it to the width of its column."""
BUCKETS = 160
"""Places along the steps; of each the lowest and the highest value are drawn, so that a spike of one sample stays."""
FIRST = ("loss", "eval.loss", "grad_norm", "lr", "throughput", "time.step", "memory.allocated")
"""What most readers look for, shown before other series."""
LOG_FROM = 50.0
"""Ratio of the largest to the smallest value from which positive values are drawn by their logarithms."""


@dataclass(slots=True)
class Line:
    """One series of a run."""

    name: str
    metric: str
    unit: str = ""
    """Unit of the metric, as in :func:`healthcheck.reports.text.number`."""
    points: list[tuple[int, float]] = field(default_factory=list)
    """(step, value); values may be non-finite."""

    @property
    def tells(self) -> bool:
        """Whether there is anything to see: two values that differ, or one that is not finite."""
        return len(self.points) > 1 and len({value for _, value in self.points}) > 1


def lines_of(batches: Iterable[Batch], units: Mapping[str, str]) -> list[Line]:
    """The series that are worth a chart; families (one series per parameter) are left out.

    :param units: metric -> unit.
    """
    found: dict[str, Line] = {}
    for batch in batches:
        for sample in batch.samples:
            if any(key == "parameter" for key, _ in sample.labels):
                continue
            name = series_name(sample.metric, sample.labels)
            found.setdefault(name, Line(name, sample.metric, units.get(sample.metric, ""))).points.append(
                (sample.step, sample.value)
            )
    order = {metric: n for n, metric in enumerate(FIRST)}
    return sorted((line for line in found.values() if line.tells), key=lambda line: order.get(line.metric, len(order)))


def recorded_lines(record: Path, units: Mapping[str, str]) -> list[Line]:
    """The series of the record in a run folder; empty where there is none."""
    try:
        with open(record / "samples.jsonl", "rb") as file:
            return lines_of(read_samples(file).batches, units)
    except OSError:
        return []


def chart(line: Line, marks: Mapping[int, str]) -> str:
    """One chart with its caption as a ``figure`` element.

    :param marks: step of an alert -> its rule.
    """
    unit = line.unit
    finite = [value for _, value in line.points if math.isfinite(value)]
    broken = [at for at, value in line.points if not math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    first, last = line.points[0][0], line.points[-1][0]
    log = low > 0 and high / low >= LOG_FROM
    said = f"{number(low, unit)} to {number(high, unit)}" if finite else "no finite value"
    said += f", last {number(line.points[-1][1], unit)}" + (", log scale" if log else "")
    if broken:
        said += f", {plural(len(broken), 'value')} not finite from step {step(broken[0])}"
    place = _Scale(first, last, *(map(math.log, (low, high)) if log else _wide_enough(low, high)))
    drawn = [f'<path class="line" d="{_path(line.points, place, log)}"/>'] if finite else []
    drawn += [
        f'<path class="mark" d="M{place.x(at):.1f} 0V{HEIGHT:g}"><title>{escape(rule)}, step {step(at)}</title></path>'
        for at, rule in marks.items()
        if first <= at <= last
    ]
    # One mark a bucket: all of a run that stays broken, in a bounded number of elements.
    columns = sorted({round(place.x(at) / WIDTH * BUCKETS) for at in broken})
    drawn += [f'<path class="broken" d="M{n * WIDTH / BUCKETS:.1f} {HEIGHT:g}v-10"/>' for n in columns]
    name = escape(line.name)
    return (
        f"<figure><figcaption><b>{name}</b> <span>{escape(said)}</span></figcaption>"
        f'<svg viewBox="0 -2 {WIDTH:g} {HEIGHT + 4:g}" role="img" preserveAspectRatio="none" '
        f'aria-label="{name}, steps {step(first)} to {step(last)}: {escape(said)}">{"".join(drawn)}</svg>'
        f'<p class="axis"><span>step {step(first)}</span><span>{step(last)}</span></p></figure>'
    )


def _wide_enough(low: float, high: float) -> tuple[float, float]:
    """A range in which a value that hardly changes looks like one: at least two hundredths of its size."""
    missing = (0.02 * max(abs(low), abs(high)) - (high - low)) / 2
    return (low - missing, high + missing) if missing > 0 else (low, high)


@dataclass(frozen=True, slots=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    def x(self, at: float) -> float:
        return (at - self.first) / ((self.last - self.first) or 1) * WIDTH

    def y(self, value: float) -> float:
        return HEIGHT / 2 if self.high == self.low else (self.high - value) / (self.high - self.low) * HEIGHT


def _path(points: Sequence[tuple[int, float]], place: _Scale, log: bool) -> str:
    """The line, broken where a value is not finite."""
    parts: list[str] = []
    pen = "M"
    for at, value in _thinned(points):
        if not math.isfinite(value):
            pen = "M"
            continue
        parts.append(f"{pen}{place.x(at):.1f} {place.y(math.log(value) if log else value):.1f}")
        pen = "L"
    return "".join(parts)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most four points a bucket: the first that is not finite, the lowest, the highest and the last."""
    if len(points) <= 4 * BUCKETS:
        return list(points)
    kept: list[tuple[int, float]] = []
    for n in range(BUCKETS):
        bucket = points[n * len(points) // BUCKETS : (n + 1) * len(points) // BUCKETS]
        finite = [p for p in bucket if math.isfinite(p[1])]
        wanted = {id(p): p for p in [p for p in bucket if not math.isfinite(p[1])][:1]}
        if finite:
            for p in (min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1]), finite[-1]):
                wanted[id(p)] = p
        kept += [p for p in bucket if id(p) in wanted]
    return kept
