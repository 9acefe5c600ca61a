"""What a value is compared with: windows of the last values, the first ones, the best one; and the condition ``ratio``."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf, sqrt
from operator import mul
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.comparators import exact_bound
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    Learning,
    OptionError,
    choice_schema,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)

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

    __slots__ = ("_with_mad", "mad", "median", "nearest", "ordered", "size", "values")

    def __init__(self, size: int, *, with_mad: bool = False) -> None:
        self.size = size
        self._with_mad = with_mad
        self.nearest = 0
        """Where in ``ordered`` the values nearest to the median begin."""
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
        low = self.nearest
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
        self.nearest = low
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
        # All but the newest are sorted at once; the newest goes the usual way, which finds median and MAD.
        kept = list(values)[-self.size :]
        self.values = deque(kept[:-1])
        self.ordered = sorted(self.values)
        self.median = self.mad = 0.0
        if kept:
            self.push(kept[-1])


class MomentsWindow:
    """The last ``size`` values with their mean, updated in constant time.

    Sums are kept relative to a shift near the data, and taken afresh once per ``size`` values, so
    that rounding errors neither cancel nor pile up. Who pushes many values in a row may write :meth:`push` out.

    :param with_std: keep the standard deviation (with n - 1; 0.0 for fewer than two values) up to date as well.
    """

    __slots__ = ("_with_std", "mean", "shift", "size", "squares", "std", "sum", "until_fresh", "values")

    def __init__(self, size: int, *, with_std: bool = False) -> None:
        self.size = size
        self._with_std = with_std
        self.sum = self.squares = 0.0
        self.until_fresh = size
        self.mean = self.std = 0.0
        self.fill(())

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        values = self.values
        n = len(values)
        if not n:
            self.shift = value
        shift = self.shift
        shifted = value - shift
        total, squares = self.sum + shifted, self.squares + shifted * shifted
        values.append(value)
        if n == self.size:
            shifted = values.popleft() - shift
            total -= shifted
            squares -= shifted * shifted
        else:
            n += 1
        self.sum, self.squares = total, squares
        # Each subtraction of what left loses some bits: sums are taken afresh before that shows.
        until = self.until_fresh = self.until_fresh - 1
        if until <= 0:
            self.refresh()
            return
        self.mean = shift + total / n
        if self._with_std:
            variance = (squares - total * total / n) / (n - 1) if n > 1 else 0.0
            self.std = sqrt(variance) if variance > 0.0 else 0.0

    def fill(self, values: Iterable[float]) -> None:
        self.values: deque[float] = deque(list(values)[-self.size :])
        self.refresh()

    def refresh(self) -> None:
        n = len(self.values)
        self.shift = sum(self.values) / n if n else 0.0
        shifted = [v - self.shift for v in self.values]
        self.sum = sum(shifted)
        self.squares = sum(map(mul, shifted, shifted))
        self.until_fresh = self.size
        self._describe()

    def _describe(self) -> None:
        n, total = len(self.values), self.sum
        self.mean = self.shift + total / n if n else 0.0
        variance = (self.squares - total * total / n) / (n - 1) if n > 1 else 0.0
        self.std = sqrt(variance) if variance > 0.0 else 0.0

    def state(self) -> Any:
        """The sums as well as the values: a restored window must round like the old one."""
        return [list(self.values), self.shift, self.sum, self.squares, self.until_fresh]

    def restore(self, state: Any) -> None:
        values, shift, total, squares, until_fresh = state
        self.values = deque(float(v) for v in values)
        self.shift, self.sum, self.squares = float(shift), float(total), float(squares)
        self.until_fresh = int(until_fresh)
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


# --------------------------------------------------------------------------------------------------
# ``ratio``: the value divided by a baseline of the samples before it.


BASELINES = ("median", "mean", "ewma", "best", "first")


class Ratio:
    """x / baseline. No score while the baseline is not positive: a ratio to it means nothing.

    Each kind of baseline says what it is now, and how it learns: one value, or a new content.
    """

    __slots__ = ("_learning", "_min_samples", "_streak", "normal", "window")

    memoryless = False

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self.window = window
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        found: Found = ()
        for value in values:
            # Scored first, learnt then: a value must not be part of what it is compared with.
            baseline = self._baseline()
            score: float | None = None
            if baseline is not None and baseline > 0.0:
                self.normal = baseline
                score = value / baseline
            if self._learning.plain:
                self._push(value)
            else:
                learnt, afresh = self._learning.admit(value, score, self._streak, self.bound)
                if afresh:
                    self._fill(learnt)
                else:
                    for one in learnt:
                        self._push(one)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def bound(self, healthy: Bound) -> Bound | None:
        baseline = self._baseline()
        if baseline is None or baseline <= 0.0:
            return None
        level = baseline
        return exact_bound(lambda value: value / level, healthy, healthy.low * level, healthy.high * level)

    def join(self, other: Any) -> Ratio | None:
        """Two ratios to the same baseline, as in ``above: 0.97`` and ``below: 1.03``, are one."""
        alike = type(other) is type(self) and other.window == self.window and other._min_samples == self._min_samples
        return other if alike and self._learning.plain and other._learning.plain else None

    def _baseline(self) -> float | None:
        raise NotImplementedError

    def _push(self, value: float) -> None:
        raise NotImplementedError

    def _fill(self, values: Sequence[float]) -> None:
        raise NotImplementedError

    def _memory(self) -> Any:
        raise NotImplementedError

    def _remember(self, memory: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        return {"memory": self._memory(), "streak": self._streak[:], "normal": self.normal}

    def restore(self, state: Any) -> None:
        self._remember(state["memory"])
        self._streak, self.normal = list(state["streak"]), state["normal"]


class RatioToMedian(Ratio):
    """The usual one: a spike moves the median of a window little."""

    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = SortedWindow(window)

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if not self._learning.plain:
            return super().update(values, steps, quiet)
        # The usual case written out, `SortedWindow.push` as well: no call for each sample.
        window, least, normal = self._window, self._min_samples, self.normal
        ordered, seen, size, median = window.ordered, window.values, window.size, window.median
        n = len(ordered)
        found: Found = ()
        for value in values:
            score: float | None = None
            if n >= least and median > 0.0:
                normal = median
                score = value / median
            if n == size:
                del ordered[bisect_left(ordered, seen.popleft())]
            else:
                n += 1
            seen.append(value)
            insort(ordered, value)
            half = n >> 1
            median = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])
            if found:
                found.append((score, normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, normal)]
        window.median, self.normal = median, normal
        return found

    def _baseline(self) -> float | None:
        return self._window.median if len(self._window.ordered) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: Sequence[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return list(self._window.values)

    def _remember(self, memory: Any) -> None:
        self._window.fill(memory)


class RatioToMean(Ratio):
    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = MomentsWindow(window)

    def _baseline(self) -> float | None:
        return self._window.mean if len(self._window) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: Sequence[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return self._window.state()

    def _remember(self, memory: Any) -> None:
        self._window.restore(memory)


class RatioToEwma(Ratio):
    """Exponential mean with weight 2 / (window + 1), started at the plain mean of the first samples."""

    __slots__ = ("_count", "_mean", "_weight")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._weight = 2.0 / (window + 1.0)
        self._mean, self._count = 0.0, 0

    def _baseline(self) -> float | None:
        return self._mean if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._count += 1
        # The plain mean while it has the greater weight, so that the first value does not rule for a whole window.
        self._mean += max(self._weight, 1.0 / self._count) * (value - self._mean)

    def _fill(self, values: Sequence[float]) -> None:
        self._mean, self._count = 0.0, 0
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._mean, self._count]

    def _remember(self, memory: Any) -> None:
        self._mean, self._count = float(memory[0]), int(memory[1])


class RatioToBest(Ratio):
    """Best of all samples so far, or of the last ``window`` where one is given."""

    __slots__ = ("_best", "_count", "_largest", "_window")

    def __init__(self, window: int, min_samples: int, learning: Learning, *, largest: bool) -> None:
        super().__init__(window, min_samples, learning)
        self._largest = largest
        self._window = SortedWindow(window) if window else None
        self._best, self._count = 0.0, 0

    def join(self, other: Any) -> Ratio | None:
        return super().join(other) if getattr(other, "_largest", None) == self._largest else None

    def _baseline(self) -> float | None:
        if self._window is not None:
            if len(self._window) < self._min_samples:
                return None
            return self._window.ordered[-1 if self._largest else 0]
        return self._best if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        if self._window is not None:
            self._window.push(value)
        elif not self._count or (value > self._best) == self._largest:
            self._best = value
        self._count += 1

    def _fill(self, values: Sequence[float]) -> None:
        self._count = 0
        if self._window is not None:
            self._window.fill(())
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._best, self._count, list(self._window.values) if self._window is not None else None]

    def _remember(self, memory: Any) -> None:
        self._best, self._count = float(memory[0]), int(memory[1])
        if self._window is not None:
            self._window.fill(memory[2] or ())


class RatioToFirst(Ratio):
    """Median of the first ``min_samples`` samples; it never changes afterwards."""

    __slots__ = ("_first", "memoryless")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._first = SortedWindow(min_samples)
        self.memoryless = False

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if not self.memoryless:
            return super().update(values, steps, quiet)
        level = self.normal = self._first.median
        found: Found = ()
        for value in values:
            score = value / level
            if found:
                found.append((score, level))
            elif not quiet.low <= score <= quiet.high:
                found = [(score, level)]
        return found

    def _baseline(self) -> float | None:
        return self._first.median if len(self._first.ordered) >= self._min_samples else None

    def _push(self, value: float) -> None:
        if len(self._first) < self._min_samples:
            self._first.push(value)
            self._settle()

    def _fill(self, values: Sequence[float]) -> None:
        self._first.fill(values)
        self._settle()

    def _settle(self) -> None:
        """Whether there is a level that a ratio can be taken to, and nothing is left to learn."""
        first = self._first
        self.memoryless = self._learning.plain and len(first) >= self._min_samples and first.median > 0.0

    def state(self) -> Any:
        # Whether somebody has been given the level already says nothing of what comes.
        return {**super().state(), "normal": self._first.median if self.memoryless else self.normal}

    def _memory(self) -> Any:
        return list(self._first.values)

    def _remember(self, memory: Any) -> None:
        self._fill(memory)


def compile_ratio(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "ratio")
    to = options.get("to", "median")
    endless = to in ("best", "first") and "window" not in options
    window = sample_count(options, "window", 200, least=1)
    default = 1 if to in ("best", "first") else 8
    min_samples = min_samples_of(rule, 1_000_000 if endless else window, default=default)
    outliers = "clip" if to in ("mean", "ewma") else "include"
    learning = Learning(rule, breaches, default=outliers, window=window)
    mode = options.get("mode")
    if mode and to != "best":
        raise OptionError("`mode` only means something with `to: best`", "mode")
    if to == "best" and mode is None and breaches.direction == 0:
        raise OptionError("say which value is best: `mode: min` or `mode: max`", "to")
    # Who asks for `below` fears a fall from the highest value, who asks for `above` a rise from the lowest.
    largest = mode == "max" if mode else breaches.direction < 0
    makers = {"median": RatioToMedian, "mean": RatioToMean, "ewma": RatioToEwma, "first": RatioToFirst}

    def make() -> Ratio:
        if to == "best":
            return RatioToBest(0 if endless else window, min_samples, learning, largest=largest)
        return makers[to](window, min_samples, learning)

    return CompiledCondition(
        "ratio",
        breaches,
        make,
        f"{{series}} {{value}} is {{score:.2f}} times its {'recent ' if not endless else ''}{to} {{normal}}",
        bounded=breaches.exact,
        baseline=True,
        min_samples=min_samples,
        window=0 if endless else window,
    )


RATIO = ConditionType(
    "ratio",
    options_schema(
        "x / baseline of the samples before x. Not judged while the baseline is zero or negative.",
        to=choice_schema("Baseline: median (default), mean, ewma, best so far, or the first samples.", *BASELINES),
        mode=choice_schema(
            "With `to: best`: which value is best. Default: max for below, min for above.", "min", "max"
        ),
        window=window_schema(least=1),
    ),
    compile_ratio,
    help="The value divided by a baseline of the samples before it.",
)
