"""The noise of a series of positive values: how far neighbours usually lie apart, in logarithms.

The median absolute difference of neighbours, which a trend does not enlarge (von Neumann, 1941, with medians). Of few
differences the mean is taken: their median is too small by chance too often. The newest two stay out: a jump is not
its own noise.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
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
            return MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n
        settled.sort()
        half = n >> 1
        noise = DIFFERENCE_TO_SIGMA * (settled[half] if n & 1 else 0.5 * (settled[half - 1] + settled[half]))
        if settled[n >> 2] == 0.0:
            return max(noise, MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n)  # many ties: a log rounds its values
        return noise

    def least(self, ahead: int) -> float | None:
        """What the noise cannot fall below with the next ``ahead`` values; None while few are known.

        One new difference moves each order statistic by one rank at most.
        """
        n = len(self.differences) - LAG
        if n < MANY:
            return None
        settled = sorted(map(abs, islice(self.differences, n)))
        return DIFFERENCE_TO_SIGMA * settled[((n - 1) >> 1) - ahead]
