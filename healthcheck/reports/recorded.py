"""The series of a recorded run, as pages and charts want them: one array of steps and one of values each."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.core.samples import CONTEXT_LABELS, Labels
from healthcheck.core.text import decode_number
from healthcheck.record.lines import parse_series
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
