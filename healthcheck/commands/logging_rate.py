"""How many steps a count of samples is, at the rate at which the latest run logged its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from healthcheck.record.lines import read_samples
from healthcheck.record.runs import Run, latest_run
from healthcheck.reports.text import plural, step
from healthcheck.rulelang.rule import Rule

TAIL = 2**20
"""Bytes of a record that are read: its end says how often a metric comes, and `check` stays quick."""
SPARSE = 2.0
"""Steps between two samples from which a count of samples is worth a line."""


def rate_lines(rules: Iterable[Rule]) -> list[str]:
    """One line for each rule whose counts of samples are many steps in the latest run; empty without a run.

    ``eval-loss-up: 3 samples are about 1,500 steps at your logging rate``, and the run that says so.
    """
    run = latest_run()
    if run is None:
        return []
    rates = steps_per_sample(run)
    lines = []
    for rule in rules:
        rate = rates.get(rule.selector.metric, 1.0)
        counts = {
            "for": rule.hold.of if not rule.hold.seconds else 1,
            "window": int(getattr(rule.condition, "window", 0) or 0),
            "min_samples": rule.min_samples,
            "warmup": int(rule.warmup.amount) if rule.warmup.unit == "samples" else 0,
        }
        told = [
            f"`{key}` of {plural(count, 'sample')} is about {step(round(count * rate))} steps"
            for key, count in counts.items()
            if count > 1
        ]
        if told and rate >= SPARSE:
            lines.append(f"  {rule.id}: {rule.selector.metric} comes every {rate:,.0f} steps; {', '.join(told)}")
    return [f"at the logging rate of {run.shown}", *lines] if lines else []


def steps_per_sample(run: Run) -> dict[str, float]:
    """Metric -> median number of steps between two samples, from the end of the record."""
    try:
        with open(run.folder / "samples.jsonl", "rb") as file:
            file.seek(0, 2)
            start = max(0, file.tell() - TAIL)
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    except OSError:
        return {}
    steps: dict[str, set[int]] = {}
    for batch in read_samples(lines).batches:
        for sample in batch.samples:
            steps.setdefault(sample.metric, set()).add(sample.step)
    return {
        name: median(after - before for before, after in pairwise(sorted(seen)))
        for name, seen in steps.items()
        if len(seen) > 1
    }
