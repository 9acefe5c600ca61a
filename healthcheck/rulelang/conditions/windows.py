"""Windows over the last n finite values, with the statistics that conditions need, and how far to trust few values.

Windows remember the values in order of arrival, so that ``values`` is their whole state.

**Few values.** A z-score over n values follows Student's t, not a normal distribution, and a scale that comes
from n values may be too small by chance. A rule that is written for a full window must not cry
wolf at the eighth sample, so its score is divided by

    widening(n) = t(n - 1) / z * sqrt(1 + 1/n)          at the one-sided tail of 0.1 %

(z = 3.09; the root counts the error of the mean itself). The factor is 1.64 at 8 samples, 1.19 at
20, 1.02 at 200. A fixed tail is used because the quantile for the tail that "8 sigmas" stands for
would be astronomically large at few samples and hide real spikes.

The MAD is 37 % efficient: n values tell as much about the scale as 0.37 n would with the standard
deviation. ``widening_mad`` therefore uses t with 0.37 (n - 1) degrees of freedom (at least 2), and
multiplies by the factor that removes the small-sample bias of the MAD.

Sources: Abramowitz and Stegun 26.7.3-4 (t distribution); 26.7.5 (expansion for many degrees of
freedom); Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of
scale", 1992 (bias factors of the MAD).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from math import inf, sqrt
from typing import Any

MAD_TO_SIGMA = 1.4826
"""MAD times this estimates the standard deviation of normal data."""
MAD_EFFICIENCY = 0.37
TAIL_Z = 3.090232306167813
"""The standard normal quantile of a one-sided tail of 0.1 %."""
TAIL_T = (
    318.3088389855303, 22.327124770119568, 10.21453185240718, 7.173182219782346, 5.893429531355917,
    5.207626238725336, 4.785289628638317, 4.500790933723708, 4.296805662729874, 4.1437004940465645,
    4.024701037630731, 3.929633264626503, 3.8519823911683755, 3.7873902375233, 3.732834425310883, 3.6861547926859997,
    3.6457673800784063, 3.6104848848251168, 3.5794001489547105, 3.551808343203323, 3.527153668869179,
    3.5049920310846314, 3.4849643749398167, 3.466777298015982, 3.45018872697304, 3.4349971815631317,
    3.421033621229274, 3.408155178353341, 3.3962402883568226, 3.3851848668292863, 3.374899280423292,
    3.3653059258594267, 3.3563372793636415, 3.347934313333507, 3.340045202098567, 3.3326242570624487,
    3.325631045196931, 3.319029655110355, 3.3127880826719016, 3.306877714085818, 3.301272888859404,
    3.2959505286297093, 3.2908898205606283, 3.286071946180284, 3.281479848231636, 3.2770980294645637,
    3.2729123783809033, 3.268910017813993, 3.2650791729288677, 3.2614090557983495, 3.2578897641780333,
    3.2545121924846105, 3.2512679532939126, 3.2481493079401407, 3.2451491050050656, 3.2422607256746616,
    3.2394780350817234, 3.2367953388866164, 3.2342073444472677, 3.2317091260242847, 3.2292960935404684,
)  # fmt: skip
"""The same quantile of Student's t for 1, 2, ... degrees of freedom. Beyond these an expansion is exact enough."""
_MAD_BIAS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


class SortedWindow:
    """The last ``size`` values, also in sorted order, with their median: no update sorts again.

    An update costs two binary searches and two list shifts.

    :param with_mad: keep the median absolute deviation up to date as well. It is exact: the k values nearest
        to the median are neighbours in the sorted window, and where they begin moves little from one
        sample to the next, so that the search starts where the last one ended.
    """

    __slots__ = ("_nearest", "_with_mad", "mad", "median", "ordered", "size", "values")

    def __init__(self, size: int, *, with_mad: bool = False) -> None:
        self.size = size
        self._with_mad = with_mad
        self._nearest = 0
        self.values: deque[float] = deque()
        self.ordered: list[float] = []
        self.median = self.mad = 0.0
        """0.0 while the window is empty."""

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        values, ordered = self.values, self.ordered
        n = len(ordered)
        if n == self.size:
            del ordered[bisect_left(ordered, values.popleft())]
        else:
            n += 1
        values.append(value)
        insort(ordered, value)
        half = n >> 1
        self.median = center = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])
        if not self._with_mad:
            return
        k = (n + 1) >> 1
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
            self.mad = nearest
        # Even: the mean of this distance and the next one, on whichever side that is nearer.
        elif not low:
            self.mad = 0.5 * (nearest + ordered[k] - center)
        else:
            self.mad = 0.5 * (nearest + (before if before < after else after))

    def fill(self, values: Iterable[float]) -> None:
        """Replace the content, keeping the newest ``size`` values."""
        kept = list(values)[-self.size :]
        self.values = deque(kept[:-1])
        self.ordered = sorted(self.values)
        self.median = self.mad = 0.0
        if kept:
            self.push(kept[-1])


class MomentsWindow:
    """The last ``size`` values with their mean, updated in constant time.

    Sums are kept relative to a shift near the data, and taken afresh once per ``size`` values, so
    that rounding errors neither cancel nor pile up.

    :param with_std: keep the standard deviation (with n - 1; 0.0 for fewer than two values) up to date as well.
    """

    __slots__ = ("_shift", "_squares", "_sum", "_until_fresh", "_with_std", "mean", "size", "std", "values")

    def __init__(self, size: int, *, with_std: bool = False) -> None:
        self.size = size
        self._with_std = with_std
        self._sum = self._squares = 0.0
        self._until_fresh = size
        self.mean = self.std = 0.0
        self.fill(())

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        values = self.values
        n = len(values)
        if not n:
            self._shift = value
        shift = self._shift
        shifted = value - shift
        total, squares = self._sum + shifted, self._squares + shifted * shifted
        values.append(value)
        if n == self.size:
            shifted = values.popleft() - shift
            total -= shifted
            squares -= shifted * shifted
        else:
            n += 1
        self._sum, self._squares = total, squares
        until = self._until_fresh = self._until_fresh - 1
        if until <= 0:
            self._refresh()
            return
        self.mean = shift + total / n
        if self._with_std:
            variance = (squares - total * total / n) / (n - 1) if n > 1 else 0.0
            self.std = sqrt(variance) if variance > 0.0 else 0.0

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
        self._describe()

    def _describe(self) -> None:
        n, total = len(self.values), self._sum
        self.mean = self._shift + total / n if n else 0.0
        variance = (self._squares - total * total / n) / (n - 1) if n > 1 else 0.0
        self.std = sqrt(variance) if variance > 0.0 else 0.0

    def state(self) -> Any:
        """The sums as well as the values: a restored window must round like the old one."""
        return [list(self.values), self._shift, self._sum, self._squares, self._until_fresh]

    def restore(self, state: Any) -> None:
        values, shift, total, squares, until_fresh = state
        self.values = deque(float(v) for v in values)
        self._shift, self._sum, self._squares = float(shift), float(total), float(squares)
        self._until_fresh = int(until_fresh)
        self._describe()


@lru_cache(maxsize=65536)
def widening(n: int) -> float:
    """Divide a z-score over ``n`` values by this. At least 1, and 1 in the limit."""
    if n < 2:
        return inf
    return _t_quantile(float(n - 1)) / TAIL_Z * sqrt(1.0 + 1.0 / n)


@lru_cache(maxsize=65536)
def widening_mad(n: int) -> float:
    """Divide a robust z-score (median and MAD of ``n`` values) by this."""
    if n < 2:
        return inf
    bias = _MAD_BIAS.get(n) or n / (n - 0.8)
    freedom = max(2.0, MAD_EFFICIENCY * (n - 1))
    return bias * _t_quantile(freedom) / TAIL_Z * sqrt(1.0 + 1.57 / n)  # 1.57: variance of a median against a mean


def _t_quantile(freedom: float) -> float:
    """The quantile of Student's t at the tail of 0.1 %, for any degrees of freedom from 1 on."""
    if freedom > len(TAIL_T) - 1:
        z, v = TAIL_Z, freedom
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )
    low = int(freedom)
    if low == freedom:
        return TAIL_T[low - 1]
    # Quantiles are close to linear in 1 / freedom between whole numbers.
    share = (1 / low - 1 / freedom) / (1 / low - 1 / (low + 1))
    return (1 - share) * TAIL_T[low - 1] + share * TAIL_T[low]
