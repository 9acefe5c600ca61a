"""The Theil-Sen slope of a sliding window, with Sen's confidence interval.

(Theil 1950; Sen, "Estimates of the regression coefficient based on Kendall's tau", 1968; variance
with ties: Mann 1945, Kendall 1975.)

The window is cut into blocks of equal length, each represented by its median: that takes out most
of the autocorrelation, single spikes, and the quadratic cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import sqrt
from typing import Any

_REBUILD = 6
"""From so many new blocks on all slopes are taken afresh: cheaper than adding block by block."""


class BlockSlopes:
    """The newest blocks of a series, and the slopes of all pairs of them, sorted.

    Values are only learnt until somebody asks: their blocks wait, and those that leave the window in
    the meantime cost nothing. A new block then adds one slope for each block in the window, and the
    oldest takes its own away.

    :param block: samples per block.
    :param most: blocks in the window.
    :param steps: take slopes over steps, not over sample numbers.
    """

    __slots__ = (
        "_asked", "_block", "_blocks", "_interval", "_levels", "_most", "_open", "_slopes", "_steps", "_steps_open", "_waiting", "count",
    )  # fmt: skip

    def __init__(self, block: int, most: int, *, steps: bool) -> None:
        self.count = 0
        """Blocks completed so far."""
        self._block = block
        self._most = most
        self._steps = steps
        self._open: list[float] = []
        self._steps_open = 0
        """Values of the block that is not complete, and the sum of their steps."""
        self._blocks: deque[tuple[float, float]] = deque()
        """(place on the axis that the slope is taken over, level)"""
        self._levels: list[float] = []
        """Those of the blocks, once they are asked for."""
        self._waiting: deque[tuple[float, float]] = deque(maxlen=most)
        self._slopes: list[float] = []
        self._asked: tuple[int, float] | None = None
        self._interval: tuple[float, float] | None = None

    def take(self, value: float, step: int) -> None:
        """Learn one value."""
        values = self._open
        values.append(value)
        self._steps_open += step
        block = self._block
        if len(values) < block:
            return
        place = self._steps_open / block if self._steps else float(self.count * block)
        if block == 1:
            level = value
        elif block == 2:
            level = (values[0] + value) / 2
        else:
            values.sort()
            half = block >> 1
            level = values[half] if block & 1 else (values[half - 1] + values[half]) / 2
        self._waiting.append((place, level))
        values.clear()
        self._steps_open = 0
        self.count += 1

    def levels(self) -> list[float]:
        """The levels of the blocks in the window, oldest first. Not to be changed."""
        if self._waiting:
            self._catch_up()
            self._levels = [level for _, level in self._blocks]
        return self._levels

    def interval(self, z: float) -> tuple[float, float] | None:
        """One-sided bounds of the slope; see :func:`theil_sen_interval`."""
        if self._asked != (self.count, z):
            levels = self.levels()
            self._asked = (self.count, z)
            self._interval = theil_sen_interval(self._slopes, levels, z)
        return self._interval

    def _catch_up(self) -> None:
        waiting, blocks = self._waiting, self._blocks
        if len(waiting) < _REBUILD:
            for place, level in waiting:
                self._add(place, level)
        else:
            blocks.extend(waiting)
            while len(blocks) > self._most:
                blocks.popleft()
            window = list(blocks)
            self._slopes = [
                (later - level) / (after - place)
                for at, (place, level) in enumerate(window)
                for after, later in window[at + 1 :]
                if after != place
            ]
            self._slopes.sort()
        waiting.clear()

    def _add(self, place: float, level: float) -> None:
        blocks, slopes = self._blocks, self._slopes
        if len(blocks) == self._most:
            x, y = blocks.popleft()
            for after, later in blocks:
                if after != x:
                    del slopes[bisect_left(slopes, (later - y) / (after - x))]
        slopes += [(level - y) / (place - x) for x, y in blocks if place != x]
        slopes.sort()  # two sorted runs and a few stragglers: far from a full sort
        blocks.append((place, level))

    def state(self) -> Any:
        blocks = [*self._blocks, *self._waiting][-self._most :]
        return [[list(b) for b in blocks], self._open[:], self._steps_open, self.count]

    def restore(self, state: Any) -> None:
        blocks, pending, steps, count = state
        self.count = int(count)
        self._open = [float(v) for v in pending]
        self._steps_open = int(steps)
        self._blocks.clear()
        self._slopes, self._levels = [], []
        self._asked = None
        self._waiting.clear()
        self._waiting.extend((float(place), float(level)) for place, level in blocks)


def theil_sen_interval(slopes: Sequence[float], ys: Sequence[float], z: float) -> tuple[float, float] | None:
    """One-sided bounds of the Theil-Sen slope, each at the confidence that ``z`` stands for.

    None when no two points differ in x. Ties in y reduce the variance of Kendall's S.

    :param slopes: of all pairs of points that differ in x, sorted.
    """
    if not slopes:
        return None
    n = len(ys)
    ties: dict[float, int] = {}
    if len(set(ys)) < n:
        for y in ys:
            ties[y] = ties.get(y, 0) + 1
    variance = (n * (n - 1) * (2 * n + 5) - sum([t * (t - 1) * (2 * t + 5) for t in ties.values()])) / 18
    half = z * sqrt(max(variance, 0.0))
    count = len(slopes)
    low = int((count - half) / 2)
    high = int((count + half) / 2 + 1)
    return (slopes[max(low - 1, 0)] if low > 0 else float("-inf"), slopes[high - 1] if high <= count else float("inf"))
