"""The noise of a series of positive values: how far neighbours usually lie apart, in logarithms.

The median absolute difference of neighbours, which a trend does not enlarge (von Neumann, 1941, with medians). Of few
differences the mean is taken: their median is too small by chance too often. Of few, a steep fall is most of what
there is; it is told from noise by second differences. The newest two stay out: a jump is not its own noise.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, pairwise
from math import pi, sqrt

from healthcheck.rulelang.conditions.windows import MAD_TO_SIGMA

WINDOW = 64
"""Differences that the noise is taken from."""
LAG = 2
"""Newest differences that are no part of the noise yet."""
MANY = 32
"""Differences from which on their median is taken."""
DIFFERENCE_TO_SIGMA = MAD_TO_SIGMA / sqrt(2.0)
"""The difference of two samples has twice the variance of one."""
MEAN_DIFFERENCE_TO_SIGMA = sqrt(pi) / 2.0
FEW = 6
"""Differences from which on their own differences are looked at."""
MEAN_BEND_TO_SIGMA = sqrt(pi / 12.0)
"""The difference of two differences has six times the variance of one value."""


class NeighbourNoise:
    """Estimates the standard deviation of one value from the differences of neighbours."""

    __slots__ = ("differences",)

    def __init__(self) -> None:
        self.differences: deque[float] = deque(maxlen=WINDOW + LAG)
        """Of logarithms, with their sign."""

    @property
    def known(self) -> int:
        """Differences that are old enough to count: :data:`WINDOW` at most."""
        return len(self.differences) - LAG

    def usual(self) -> float:
        """The noise now; there must be a :attr:`known` difference."""
        n = len(self.differences) - LAG
        settled = [*map(abs, islice(self.differences, n))]
        if n < MANY:
            return self._of_few(settled)
        settled.sort()
        half = n >> 1
        noise = DIFFERENCE_TO_SIGMA * (settled[half] if n & 1 else 0.5 * (settled[half - 1] + settled[half]))
        if settled[n >> 2] == 0.0:
            return max(noise, MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n)  # many ties: a log rounds its values
        return noise

    def _of_few(self, settled: list[float]) -> float:
        """Of few differences, their mean. What bends little is a steep fall and no noise: then the bends tell it."""
        n = len(settled)
        noise = MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n
        if n < FEW:
            return noise
        bends = sum(abs(b - a) for a, b in pairwise(islice(self.differences, n)))
        return min(noise, MEAN_BEND_TO_SIGMA * bends / (n - 1))

    def least(self, ahead: int) -> float:
        """What the noise cannot fall below with the next ``ahead`` values; there must be :data:`WINDOW` differences.

        One new difference moves each order statistic by one rank at most.
        """
        settled = sorted(map(abs, islice(self.differences, WINDOW)))
        return DIFFERENCE_TO_SIGMA * settled[((WINDOW - 1) >> 1) - ahead]
