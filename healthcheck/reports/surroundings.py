"""What else changed around an alert: other series against their own recent past. Facts, no culprits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from healthcheck.reports.record.samplelines import Batch
from healthcheck.reports.text import number, plural
from healthcheck.samples import CONTEXT_LABELS, series_name

BEFORE = 20
"""Samples of the recent past."""
LOOK_BACK = 3
"""Steps before the first breach that are searched for a change."""
ALWAYS = ("lr",)
"""Metrics whose steadiness is worth a word as well."""


@dataclass(slots=True)
class Change:
    """One series that left its range near the alert."""

    series: str
    step: int
    usual: float
    value: float
    strength: float

    metric: str

    def text(self, first_step: int, unit: str = "") -> str:
        """``grad_norm 0.9 -> 14.2 one step earlier``."""
        values = f"{number(self.usual, unit)} -> {number(self.value, unit)}"
        return f"{self.series} {values} {_when(self.step - first_step)}"


def _when(offset: int) -> str:
    if offset == 0:
        return "at the same step"
    amount = "one step" if abs(offset) == 1 else plural(abs(offset), "step")
    return f"{amount} {'earlier' if offset < 0 else 'later'}"


def changes_around(
    batches: Iterable[Batch], first_step: int, fired_step: int, *, leave_out: str, most: int = 4
) -> tuple[list[Change], list[str]]:
    """The strongest changes of other series, and those of ``ALWAYS`` that did not change.

    :param first_step: step of the first breaching sample.
    :param leave_out: the alert's own series.

    Families (per parameter) are left out: their worst members stand in the alert.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for batch in batches:
        if batch.at > fired_step + 1:
            break
        for sample in batch.samples:
            if all(name in CONTEXT_LABELS for name, _ in sample.labels):
                series.setdefault(series_name(sample.metric, sample.labels), []).append((sample.step, sample.value))
    changes, steady = [], []
    for name, values in series.items():
        if name == leave_out:
            continue
        change = _change(name, values, first_step, fired_step)
        if change is not None:
            changes.append(change)
        elif name in ALWAYS:
            steady.append(name)
    changes.sort(key=lambda c: (-c.strength, c.series))
    return changes[:most], steady


def _change(name: str, values: list[tuple[int, float]], first_step: int, fired_step: int) -> Change | None:
    past = [v for at, v in values if at < first_step - LOOK_BACK and math.isfinite(v)][-BEFORE:]
    if len(past) < 5:
        return None
    usual = median(past)
    spread = 1.4826 * median(abs(v - usual) for v in past)
    limit = max(8 * spread, 0.2 * abs(usual), 1e-12)
    for at, value in values:
        if not first_step - LOOK_BACK <= at <= fired_step:
            continue
        if not math.isfinite(value):
            return Change(name, at, usual, value, math.inf, name.partition("[")[0])
        if abs(value - usual) > limit:
            strength = abs(value - usual) / max(spread, 0.01 * abs(usual), 1e-12)
            return Change(name, at, usual, value, strength, name.partition("[")[0])
    return None
