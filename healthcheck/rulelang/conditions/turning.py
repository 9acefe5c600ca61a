"""The scorer of ``rebound``: level, lowest level and noise, from one value to the next."""

from __future__ import annotations

from itertools import accumulate, islice
from math import exp, log, sqrt
from typing import Any

from healthcheck.rulelang.conditions.newlevel import shift_in
from healthcheck.rulelang.conditions.noise import WINDOW, NeighbourNoise
from healthcheck.rulelang.conditions.windows import SortedWindow

SHARE = 8
"""The level is the median of one sample in so many of those so far."""
NOISE_FLOOR = 0.002
"""Noise is at least this share of the level."""
LOOK_AHEAD = 16
"""Samples for which one sorting of the differences bounds the noise."""
ROUNDING = 1e-9
"""The bound is narrower by this share, for the sake of rounding errors."""
DENSE = 2
"""Steps between two samples up to which a jump from one to the next is a jump, and no rise that was not seen."""
GLIDE = 20
"""Samples after the lowest for which a steep fall before it explains a rise: momentum of 0.9 has forgotten it then."""
STEEPER = 3.0
"""The fall is steep if it was more than so many times the rise, in logarithms, over as many samples."""
FEW = 3
"""Samples in the level from which on one small value is not the lowest."""


class Rebound:
    """Score: level / lowest level so far; 1 while one of the demands is not met."""

    __slots__ = (
        "_behind",
        "_best",
        "_best_at",
        "_count",
        "_dense_since",
        "_fell",
        "_first",
        "_last",
        "_last_level",
        "_last_step",
        "_lowest",
        "_min_samples",
        "_negative",
        "_noise",
        "_recent",
        "_sigmas",
        "_small",
        "_small_until",
        "_smooth",
        "normal",
    )

    def __init__(self, min_samples: int, *, smooth: int, sigmas: float, fell: float, behind: float) -> None:
        self.normal: float | None = None
        self._min_samples = min_samples
        self._smooth, self._sigmas, self._fell, self._behind = smooth, sigmas, fell, behind
        self._recent = SortedWindow(1)
        self._noise = NeighbourNoise()
        self._small, self._small_until = 1.0, 0
        """Ratios up to the first are within the noise, as long as there are no more samples than the second."""
        self._count = 0
        self._last = self._last_level = self._first = self._best = self._lowest = 0.0
        self._best_at = 0
        self._last_step = self._dense_since = 0
        """The step of the newest sample, and the number of the sample from which on there was none far apart."""
        self._negative = False

    def update(self, value: float, step: int) -> float | None:
        if value <= 0.0:
            self._negative = self._negative or value < 0.0
            return None
        if self._negative:
            return None
        count = self._count = self._count + 1
        recent = self._recent
        if recent.size < self._smooth:
            # An eighth of the samples grows by one every eighth sample: the window never has to forget two at once.
            recent.size = max(1, min(self._smooth, count // SHARE))
        recent.push(value)
        if count > 1 and self._sigmas:
            self._noise.differences.append(log(value / self._last))
            if step - self._last_step > DENSE:
                self._dense_since = count
        self._last, self._last_step = value, step
        level = low = recent.median
        if level < self._lowest or count == 1:
            self._lowest = level
        if recent.size < FEW and self._sigmas and self._dense_since < count:
            if self._last_level > low:
                low = self._last_level
            self._last_level = level
            level = recent.ordered[0]  # nor is a single large one a rise
        best = self._best
        if low < best or count == 1:
            if count == 1:
                self._first = level
            best = self._best = self.normal = low
            self._best_at = count
        if count < self._min_samples:
            return None
        ratio = level / best if level > best else 1.0
        if ratio <= self._small and (count <= self._small_until or ratio == 1.0):
            return 1.0
        return ratio if self._turned(ratio) else 1.0

    def _turned(self, ratio: float) -> bool:
        if self._lowest > self._first * (1.0 - self._fell):
            return False
        if self._count - self._best_at < self._behind * self._count:
            return False
        if not self._sigmas:
            return True
        known = self._noise.known
        if known < 1:
            return False
        asked = self._sigmas * (1.0 + 1.0 / sqrt(len(self._recent.ordered)))
        if known == WINDOW and len(self._recent.ordered) == self._smooth:
            self._small = exp(asked * max(NOISE_FLOOR, self._noise.least(LOOK_AHEAD))) * (1.0 - ROUNDING)
            self._small_until = self._count + LOOK_AHEAD
        noise = max(NOISE_FLOOR, self._noise.usual())
        if log(ratio) <= asked * noise or self._glides(log(ratio)):
            return False
        return self._recent.size < FEW or not self._shifted(noise)

    def _glides(self, rise: float) -> bool:
        """Whether momentum has carried the loss past its lowest point: it fell far more just before than it rose since.

        Without noise, as on the full batch, the first swing of Adam is many times what neighbours lie apart.
        """
        known = min(3 * GLIDE, len(self._noise.differences), self._count - self._dense_since)
        path = [
            0.0,
            *accumulate(islice(reversed(self._noise.differences), known)),
        ]  # from the newest value back: fallen
        since = max(range(len(path)), key=path.__getitem__)
        if not 0 < since <= GLIDE or len(path) <= 2 * since:
            return False
        return path[since] - path[2 * since] > STEEPER * rise

    def _shifted(self, noise: float) -> bool:
        """Whether a new level explains the rise, or may yet; once it does, the lowest level is sought from it on."""
        since = self._count - max(self._dense_since, self._best_at - self._smooth // 2)
        jumps = list(self._noise.differences)[-since:] if since > 0 else []
        shift = shift_in(jumps, self._last, noise, best=self._best, first=self._first)
        if shift is None:
            return False
        if shift.settled:
            self._recent.fill(shift.values)
            self._best = self.normal = self._last_level = self._recent.median
            self._best_at = self._count + self._smooth // 2  # so that this jump is not looked at again
            self._small_until = 0
        return True

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": list(self._noise.differences),
            "numbers": [self._count, self._last, self._first, self._best, self._best_at, self._negative],
            "places": [self._last_step, self._dense_since, self._last_level, self._lowest],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._first, self._best, self._best_at, self._negative = state["numbers"]
        self._last_step, self._dense_since, self._last_level, self._lowest = state["places"]
        self.normal = self._best if self._count else None
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        self._noise.differences.clear()
        self._noise.differences.extend(float(d) for d in state["differences"])
        self._small, self._small_until = 1.0, 0
