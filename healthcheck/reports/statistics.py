"""What is normal in a run: per series count, min, median, p99, max, last and MAD; per rule its closest approach."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from healthcheck.core.samples import series_name
from healthcheck.core.text import decode_number
from healthcheck.record.lines import Batch

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
