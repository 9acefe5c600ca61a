"""Windows over the last n finite values, with the statistics that conditions need.

All of them remember the values in order of arrival, so that ``values`` is their whole state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from math import inf, sqrt
from statistics import median
from typing import Any

MAD_TO_SIGMA = 1.4826
"""MAD times this estimates the standard deviation of normal data."""


class SortedWindow:
    """The last ``size`` values, also in sorted order: median and MAD without sorting again.

    ``median`` is kept up to date. An update costs two binary searches and two list shifts. The MAD is exact: the k values nearest
    to the median are neighbours in the sorted window, and where they begin moves little from one
    sample to the next, so that the search starts where the last one ended.
    """

    __slots__ = ("_nearest", "median", "ordered", "size", "values")

    def __init__(self, size: int) -> None:
        self.size = size
        self._nearest = 0
        self.values: deque[float] = deque()
        self.ordered: list[float] = []
        self.median = 0.0
        """0.0 while the window is empty."""

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        values, ordered = self.values, self.ordered
        if len(values) == self.size:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)
        n = len(ordered)
        half = n >> 1
        self.median = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])

    def fill(self, values: Iterable[float]) -> None:
        """Replace the content, keeping the newest ``size`` values."""
        self.values = deque(list(values)[-self.size :])
        ordered = self.ordered = sorted(self.values)
        self.median = median(ordered) if ordered else 0.0

    def center_and_mad(self) -> tuple[float, float]:
        """Median and median absolute deviation."""
        ordered = self.ordered
        n = len(ordered)
        k = (n + 1) >> 1
        center = self.median
        last = n - k
        low = self._nearest
        if low > last:
            low = last
        # Of a window that is one too far left, the left end is farther from the median than the value after it.
        before = center - ordered[low - 1] if low else inf
        after = ordered[low + k] - center if low < last else inf
        left, right = center - ordered[low], ordered[low + k - 1] - center
        while before <= right:
            low -= 1
            after, left, right = right, before, ordered[low + k - 1] - center
            before = center - ordered[low - 1] if low else inf
        while left > after:
            low += 1
            before, left, right = left, center - ordered[low], after
            after = ordered[low + k] - center if low < last else inf
        self._nearest = low
        nearest = left if left > right else right
        if n & 1:
            return center, nearest
        # Even: the mean of this distance and the next one, on whichever side that is nearer.
        if not low:
            return center, 0.5 * (nearest + ordered[k] - center)
        return center, 0.5 * (nearest + (before if before < after else after))

    def quantile(self, fraction: float) -> float:
        """Linear interpolation between the two nearest values (Hyndman and Fan's type 7)."""
        ordered = self.ordered
        place = fraction * (len(ordered) - 1)
        low = int(place)
        if low + 1 >= len(ordered):
            return ordered[-1]
        return ordered[low] + (place - low) * (ordered[low + 1] - ordered[low])


class MomentsWindow:
    """The last ``size`` values with their mean and standard deviation, updated in constant time.

    Sums are kept relative to a shift near the data, and taken afresh once per ``size`` values, so
    that rounding errors neither cancel nor pile up.
    """

    __slots__ = ("_shift", "_squares", "_sum", "_until_fresh", "size", "values")

    def __init__(self, size: int) -> None:
        self.size = size
        self.fill(())

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        values = self.values
        if not values:
            self._shift = value
        shifted = value - self._shift
        self._sum += shifted
        self._squares += shifted * shifted
        values.append(value)
        if len(values) > self.size:
            shifted = values.popleft() - self._shift
            self._sum -= shifted
            self._squares -= shifted * shifted
        self._until_fresh -= 1
        if self._until_fresh <= 0:
            self._refresh()

    def mean(self) -> float:
        return self._shift + self._sum / len(self.values)

    def std(self) -> float:
        """Standard deviation with n - 1; 0.0 for fewer than two values."""
        n = len(self.values)
        if n < 2:
            return 0.0
        variance = (self._squares - self._sum * self._sum / n) / (n - 1)
        return sqrt(variance) if variance > 0.0 else 0.0

    def fill(self, values: Iterable[float]) -> None:
        self.values: deque[float] = deque(list(values)[-self.size :])
        self._refresh()

    def _refresh(self) -> None:
        n = len(self.values)
        self._shift = sum(self.values) / n if n else 0.0
        shifted = [v - self._shift for v in self.values]
        self._sum = sum(shifted)
        self._squares = sum(v * v for v in shifted)
        self._until_fresh = self.size

    def state(self) -> Any:
        """The sums as well as the values: a restored window must round like the old one."""
        return [list(self.values), self._shift, self._sum, self._squares, self._until_fresh]

    def restore(self, state: Any) -> None:
        values, shift, total, squares, until_fresh = state
        self.values = deque(float(v) for v in values)
        self._shift, self._sum, self._squares = float(shift), float(total), float(squares)
        self._until_fresh = int(until_fresh)
