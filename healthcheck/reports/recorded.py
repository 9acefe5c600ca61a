"""The series of a recorded run, as pages and charts want them: one array of steps and one of values each; and what is
normal in them."""

from __future__ import annotations

import itertools
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from healthcheck.core.samples import CONTEXT_LABELS, Labels, series_name
from healthcheck.core.text import decode_number
from healthcheck.record.lines import Batch, parse_series
from healthcheck.record.segments import sample_lines

FIRST = ("loss", "eval.loss", "grad_norm", "lr", "throughput", "time.step", "memory.allocated")
"""What most readers look for, shown before other series."""
NEXT = ("update_ratio", "grad.layer_ratio", "eval.accuracy", "reward", "kl", "entropy", "params.norm")
"""What comes after these and the metrics that the script itself has logged."""


@dataclass(slots=True)
class Series:
    """One series of a run."""

    name: str
    metric: str
    labels: Labels = ()
    unit: str = ""
    """Unit of the metric, as in :func:`healthcheck.core.text.number`."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """May be non-finite."""

    @property
    def parameter(self) -> str:
        """The tensor or layer whose series this is; empty for one of the whole model."""
        return next((value for key, value in self.labels if key not in CONTEXT_LABELS), "")

    @property
    def row(self) -> str:
        """What a row of a heat map is called: the tensor or layer, else the rank."""
        return self.parameter or " ".join(f"{key} {value}" for key, value in self.labels)

    @property
    def tells(self) -> bool:
        """Whether there is anything to see: two values that differ, or one that is not finite."""
        first = self.values[0] if self.values else 0.0
        return any(value != first for value in self.values) or (bool(self.values) and not math.isfinite(first))

    @property
    def flag(self) -> bool:
        """Whether it counts or says yes and no: few whole numbers, which rarely change."""
        seen = set(self.values[:2000])
        return len(seen) <= 3 and all(value in (0.0, 1.0) or value == int(value) for value in seen if value == value)


@dataclass(slots=True)
class Recorded:
    """All series of one run, in the order in which most readers look for them."""

    series: dict[str, Series] = field(default_factory=dict)
    thinned_to: int = 0
    gaps: int = 0
    evaluations: list[int] = field(default_factory=list)
    """Steps at which an evaluation gave a value."""
    name: str = ""

    def whole(self) -> Iterator[Series]:
        """Series of the whole model that are worth a chart."""
        return (one for one in self.series.values() if not one.parameter and one.tells)

    def family(self, metric: str) -> list[Series]:
        """The series of one metric by layer or tensor."""
        return [one for one in self.series.values() if one.metric == metric and one.parameter]

    @property
    def first_step(self) -> int:
        return min((one.steps[0] for one in self.series.values() if one.steps), default=0)

    @property
    def last_step(self) -> int:
        return max((one.steps[-1] for one in self.series.values() if one.steps), default=0)


def recorded(record: Path, units: Mapping[str, str]) -> Recorded:
    """The series in a run folder; none where nothing was recorded.

    :param units: metric -> unit.
    """
    try:
        found = from_lines(sample_lines(record), units)
    except OSError:
        found = Recorded()
    found.name = record.name
    return found


def from_lines(lines: Iterable[bytes], units: Mapping[str, str]) -> Recorded:
    """The same from the lines; those that are damaged are passed over."""
    found = Recorded()
    names: dict[str, Series] = {}
    spelled: dict[str, tuple[str, Labels]] = {}
    evaluations: set[int] = set()
    for line in lines:
        try:
            entry = json.loads(line)
            values = entry.get("m")
            if values is None:
                for name, (metric, labels) in entry.get("series", {}).items():
                    spelled[name] = (metric, tuple((str(k), str(v)) for k, v in labels))
                found.gaps += int(entry.get("gap", 0))
                found.thinned_to = int(entry.get("to", found.thinned_to))
                continue
            at = int(entry["step"])
            if entry.get("p") == "eval":
                evaluations.add(at)
            for name, value in values.items():
                one = names.get(name)
                if one is None:
                    metric, labels = spelled.get(name) or parse_series(name)
                    one = names[name] = Series(name, metric, labels, units.get(metric, ""))
                number = value if value.__class__ is float else decode_number(value)
                one.steps.append(at)
                one.values.append(number)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
    for one in names.values():
        _in_order(one)
    order = {metric: n for n, metric in enumerate(FIRST)}

    def place(one: Series) -> tuple[int, int]:
        logged = one.metric not in units or one.metric in NEXT
        return order.get(one.metric, len(order)), 0 if logged else 1

    listed = sorted(names.values(), key=place)
    found.series = {one.name: one for one in listed}
    found.evaluations = sorted(evaluations | {at for one in listed if one.metric == "eval.loss" for at in one.steps})
    return found


def _in_order(one: Series) -> None:
    """Late values may come behind those of later steps; charts go from left to right."""
    steps = one.steps
    if all(a <= b for a, b in itertools.pairwise(steps)):
        return
    order = sorted(range(len(steps)), key=steps.__getitem__)
    one.steps = array("q", (steps[i] for i in order))
    one.values = array("d", (one.values[i] for i in order))


def checkpoints_of(record: Path) -> list[int]:
    """Steps at which the script has written checkpoints, as far as the record knows."""
    found = set()
    for path in record.glob("checkpoints/step-*.json"):
        digits = path.stem.removeprefix("step-")
        if digits.isdigit():
            found.add(int(digits))
    return sorted(found)


def restarts_of(facts: Mapping[str, Any], report: Mapping[str, Any] | None) -> list[int]:
    """Steps after which an attempt began."""
    begun = {facts.get("resumed_from"), (report or {}).get("resumed_from")}
    begun |= {resume.get("step") for resume in (report or {}).get("record", {}).get("resumes", ())}
    return sorted(int(at) for at in begun if at)


# --------------------------------------------------------------------------------------------------
# What is normal in it: per series count, min, median, p99, max, last and MAD; per rule its closest approach.


_PLAIN = re.compile(r"(?P<side>above|below|at least|at most) (?P<limit>[\d.]+(?:e[+-]?\d+)?)(?P<percent>%?)")


def plain_limit(words: str) -> tuple[float, int] | None:
    """The limit in ``above 8`` or ``at most 5%``, and the side on which values breach; None for other words."""
    plain = _PLAIN.fullmatch(words)
    if plain is None:
        return None
    limit = float(plain["limit"]) * (0.01 if plain["percent"] else 1.0)
    return limit, 1 if plain["side"] in ("above", "at least") else -1


@dataclass(slots=True)
class SeriesSummary:
    """The values of one series over a run; non-finite ones are counted apart and enter nothing else."""

    name: str
    metric: str
    samples: int
    nonfinite: int
    last: float
    last_step: int
    minimum: float | None = None
    median: float | None = None
    p99: float | None = None
    maximum: float | None = None
    mad: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "series": self.name,
            "samples": self.samples,
            "nonfinite": self.nonfinite,
            "min": self.minimum,
            "median": self.median,
            "p99": self.p99,
            "max": self.maximum,
            "mad": self.mad,
            "last": self.last,
            "last_step": self.last_step,
        }


def summarise(batches: Iterable[Batch]) -> list[SeriesSummary]:
    """One summary per series, in the order of their first samples."""
    values: dict[str, list[float]] = {}
    metric_of: dict[str, str] = {}
    last_step: dict[str, int] = {}
    for batch in batches:
        for sample in batch.samples:
            name = series_name(sample.metric, sample.labels)
            values.setdefault(name, []).append(sample.value)
            metric_of[name] = sample.metric
            last_step[name] = sample.step
    return [_summary(name, metric_of[name], seen, last_step[name]) for name, seen in values.items()]


def _summary(name: str, metric: str, values: Sequence[float], last_step: int) -> SeriesSummary:
    finite = sorted(v for v in values if math.isfinite(v))
    made = SeriesSummary(name, metric, len(values), len(values) - len(finite), values[-1], last_step)
    if finite:
        middle = median(finite)
        made.minimum, made.maximum, made.median = finite[0], finite[-1], middle
        made.p99 = finite[max(0, math.ceil(0.99 * len(finite)) - 1)]  # the nearest rank: a value that occurred
        made.mad = median(abs(v - middle) for v in finite)
    return made


@dataclass(slots=True)
class Approach:
    """How near one rule came to firing."""

    rule: str
    verdict: str
    threshold: str
    samples: int
    score: float | None
    step: int | None
    reason: str = ""

    @property
    def part_of_limit(self) -> float | None:
        """How much of the way to a plain limit a rule went without firing: 0.5 is half of ``above 8``.

        None where that says nothing: it fired, or its condition is more than one limit on one side.
        """
        plain = plain_limit(self.threshold)
        if plain is None or self.score is None or self.verdict != "ok" or not math.isfinite(self.score):
            return None
        limit, side = plain
        far, near = (self.score, limit) if side > 0 else (limit, self.score)
        if far <= 0 or near <= 0:
            return None
        return min(1.0, far / near)

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "threshold": self.threshold,
            "samples": self.samples,
            "score": self.score,
            "step": self.step,
            "reason": self.reason,
        }


def approaches(rules: Mapping[str, Mapping[str, Any]]) -> list[Approach]:
    """The closest approaches in the ``rules`` of a report, in file order."""
    found = []
    for rule, entry in rules.items():
        closest = entry.get("closest") or {}
        score = decode_number(closest["score"]) if closest.get("score") is not None else None
        found.append(
            Approach(
                rule,
                str(entry["verdict"]),
                str(entry.get("threshold", "")),
                int(entry.get("samples", 0)),
                score,
                closest.get("step"),
                str(entry.get("reason", "")),
            )
        )
    return found
