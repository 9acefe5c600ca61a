"""Whether a record that begins again at its first step holds another run from there: folds, seeds, sweeps in one file.

A run that goes on after a crash, or whose log counts steps of each epoch, goes on with the loss that it had. Another one
begins with a loss like that with which the first began, or a worse one. Records of rewards alone count episodes and steps of
the environment, which no epoch sets back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import median

from healthcheck.core.samples import Sample

KEPT = 64
"""Batches of samples at the beginning and before the newest one in which losses are looked for."""
LOSSES = ("loss", "eval.loss")
FEW = 3
"""Values of a loss that say where it began, and where it stood."""


class Beginnings:
    """Remembers how the run at hand began and where it stands."""

    def __init__(self) -> None:
        self._first: list[Sequence[Sample]] = []
        self._last: deque[Sequence[Sample]] = deque(maxlen=KEPT)

    def saw(self, samples: Sequence[Sample]) -> None:
        """Note the next batch of the run."""
        if len(self._first) < KEPT:
            self._first.append(samples)
        self._last.append(samples)

    def another(self, samples: Sequence[Sample]) -> bool:
        """Whether these samples, at the first step again, are another run's; then nothing of the one before is kept."""
        found = self._is_another(samples)
        if found:
            self._first, self._last = [], deque(maxlen=KEPT)
        return found

    def _is_another(self, samples: Sequence[Sample]) -> bool:
        for metric in LOSSES:
            first, last = _values(self._first, metric), _values(reversed(self._last), metric)
            now = _values([samples], metric)
            if first and last and now:
                return _begins_again(now[0], first, last)
        return any(sample.metric == "reward" for batch in self._last for sample in batch)


def _begins_again(now: float, first: Sequence[float], last: Sequence[float]) -> bool:
    """Outside of where it stood last, and nearer to where it began (or worse than both)."""
    finite = [value for value in last if isfinite(value)]
    if not finite or not isfinite(now):
        return isfinite(now)  # a loss that was NaN does not mend itself
    low, high, began = min(finite), max(finite), median(first)
    spread = high - low
    if now > high + spread:
        return now > 0.5 * (began + median(finite))
    return now < low - spread and abs(now - began) < abs(now - median(finite))


def _values(batches: Iterable[Sequence[Sample]], metric: str) -> list[float]:
    """The values of a plain metric in the first few batches that have it."""
    found: list[float] = []
    for samples in batches:
        found += [sample.value for sample in samples if sample.metric == metric and not sample.labels]
        if len(found) >= FEW:
            break
    return found[:FEW]
