"""The record of a run that goes on, read as it grows: newest values, what is usual, the pace."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from healthcheck.reports.record.runs import Run
from healthcheck.reports.record.samplelines import Batch, read_samples
from healthcheck.samples import series_name

KEPT = 200
"""Values per series from which the usual one is taken."""
TAIL = 2**21
"""Bytes of an old record that are read at first: a long run is followed from where it is."""


@dataclass(slots=True)
class Followed:
    """One series: its newest values, oldest first."""

    metric: str
    values: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def last(self) -> float:
        return self.values[-1][1]

    @property
    def usual(self) -> float | None:
        """Median of the finite values that are kept."""
        finite = [value for _, value in self.values if math.isfinite(value)]
        return median(finite) if finite else None


class Follower:
    """Reads what has come since the last look. The record may be thinned meanwhile; then it is read anew."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.series: dict[str, Followed] = {}
        self.step = 0
        self._at = -1

    @property
    def silent(self) -> float:
        """Seconds since the record was last written to."""
        try:
            return max(0.0, time.time() - (self.run.folder / "samples.jsonl").stat().st_mtime)
        except OSError:
            return 0.0

    def look(self) -> None:
        """Take in the lines that are complete by now."""
        try:
            with open(self.run.folder / "samples.jsonl", "rb") as file:
                size = file.seek(0, 2)
                anew = self._at < 0 or size < self._at
                start = max(0, size - TAIL) if anew else self._at
                file.seek(start)
                new = file.read(size - start)
        except OSError:
            return
        if anew:
            self.series.clear()
        whole = new.rfind(b"\n") + 1
        begin = new.find(b"\n") + 1 if anew and start else 0
        self._at = start + whole
        self._take(read_samples(new[begin:whole].splitlines()).batches)

    def _take(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.step = max(self.step, batch.at)
            for sample in batch.samples:
                if any(key == "parameter" for key, _ in sample.labels):
                    continue
                name = series_name(sample.metric, sample.labels)
                self.series.setdefault(name, Followed(sample.metric)).values.append((sample.step, sample.value))
