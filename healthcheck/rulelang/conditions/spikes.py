"""Conditions that find spikes: ``zscore`` and ``robust_z``, the distance from what is usual in units of what it varies.

Both divide by a factor that is larger while the window has few samples, see ``windows.py``.

Mean and standard deviation are carried away by the very spike that they should find; the median and the MAD (Hampel,
"The Influence Curve and its Role in Robust Estimation", 1974) are not, which makes ``robust_z`` the default detector of
spikes (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from math import ceil, copysign, exp, inf, isfinite, log, sqrt
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.comparators import EVERYTHING, exact_bound
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    Learning,
    flag_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import MAD_TO_SIGMA, MomentsWindow, SortedWindow, widening, widening_mad

FLOOR = 0.001
"""The scale is at least this share of the centre, so that a constant series divides by something."""
MEAN_DEVIATION_TO_SIGMA = 1.2533
"""For windows in which more than half of the values are equal: Iglewicz and Hoaglin's fallback."""
APART = 8
"""Distances between the window's samples, in steps, from which on the last sample is too long ago to jump from."""
USUAL, FEW = 0.03, 2
"""Part of the older half of the window that makes a high value a usual one, and how many at least."""


def _in_scales(away: float, scale: float) -> float:
    """A distance in units of a scale. In a window of equal values anything else is infinitely far."""
    return away / scale if scale > 0.0 else (copysign(inf, away) if away else 0.0)


class ZScore:
    """(x - mean) / std over the samples before x, narrowed while the window has few of them."""

    __slots__ = ("_learning", "_min_samples", "_streak", "_window", "normal")

    memoryless = False

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self._window = MomentsWindow(window, with_std=True)
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        window, learning, streak = self._window, self._learning, self._streak
        held, size = window.values, window.size
        plain, exact = learning.plain, learning.breaches.exact
        low, high = learning.breaches.healthy.low, learning.breaches.healthy.high
        found: Found = ()
        for value in values:
            score: float | None = None
            n = len(held)
            if n >= self._min_samples:
                mean = self.normal = window.mean
                scale, floor = window.std, FLOOR * abs(mean)
                scale = (scale if scale > floor else floor) * widening(n)
                score = (value - mean) / scale if scale > 0.0 else _in_scales(value - mean, scale)
            if plain or (not streak and (score is None or (exact and low <= score <= high))):
                # `MomentsWindow.push` written out: a call for each sample of each rule is most of what it costs.
                if not n:
                    window.shift = value
                shift = window.shift
                shifted = value - shift
                total, squares = window.sum + shifted, window.squares + shifted * shifted
                held.append(value)
                if n == size:
                    shifted = held.popleft() - shift
                    total -= shifted
                    squares -= shifted * shifted
                else:
                    n += 1
                window.sum, window.squares = total, squares
                window.until_fresh -= 1
                if window.until_fresh <= 0:
                    window.refresh()
                else:
                    window.mean = shift + total / n
                    variance = (squares - total * total / n) / (n - 1) if n > 1 else 0.0
                    window.std = sqrt(variance) if variance > 0.0 else 0.0
            else:
                # By the score before the value is learnt: its own outlier must not widen the scale that judges it.
                learnt, afresh = learning.admit(value, score, streak, self.bound)
                if afresh:
                    window.fill(learnt)
                    held = window.values
                else:
                    for one in learnt:
                        window.push(one)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def bound(self, healthy: Bound) -> Bound | None:
        n = len(self._window.values)
        if n < self._min_samples:
            return None
        mean = self._window.mean
        scale = max(self._window.std, FLOOR * abs(mean)) * widening(n)
        low, high = healthy.low, healthy.high
        return exact_bound(lambda v: _in_scales(v - mean, scale), healthy, mean + low * scale, mean + high * scale)

    def state(self) -> Any:
        return {"window": self._window.state(), "streak": self._streak[:], "normal": self.normal}

    def restore(self, state: Any) -> None:
        self._window.restore(state["window"])
        self._streak, self.normal = list(state["streak"]), state["normal"]


class RobustZ:
    """(x - median) / (1.4826 MAD) over the samples before x.

    :param use_log: judge logarithms, as long as the whole window and the value are positive. The logarithms are kept
        sorted; minus infinity stands for a value that has none, and while there is one the plain values are judged,
        sorted afresh for each sample (slow, rare, exact).
    :param min_ratio: a value that is less than so many times away from the median cannot breach: its score is then its
        share of that distance (in logarithms), as a share of the limit, so that it stays on the healthy side and the
        closest approach still tells how near it came. Where the median or the value is not positive a ratio means
        nothing, and the score stands. Nor can a value breach then if two of the window's older half (or 3 % of it) were at
        least half as far away: tasks that take turns, each with a level of its own, make no spikes. What grows has
        reached only the newer half. And the sample before must be near: where a run is watched less often from some
        step on, a slow change between two samples is no jump.
    """

    __slots__ = (
        "_factor",
        "_factor_n",
        "_fine",
        "_learning",
        "_log_ratio",
        "_min_samples",
        "_plain",
        "_steps",
        "_streak",
        "_use_log",
        "_values",
        "_window",
        "normal",
    )

    memoryless = False

    def __init__(
        self, window: int, min_samples: int, learning: Learning, *, use_log: bool = False, min_ratio: float = 1.0
    ) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window, with_mad=True)
        """What is judged: values or their logarithms."""
        self._values: deque[float] = deque(maxlen=window)
        """The values of a window of logarithms."""
        self._use_log = use_log
        self._min_samples = min_samples
        self._learning = learning
        self._plain, self._fine = learning.plain, learning.breaches.healthy
        self._streak: list[float] = []
        self._steps: deque[int] = deque(maxlen=window)
        """Of the newest samples, where ``min_ratio`` is asked for."""
        self._factor_n, self._factor = 0, 1.0
        self._log_ratio = log(min_ratio)

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if not self._plain:
            return self._update_choosing(values, steps, quiet)
        # The usual case written out, `SortedWindow.push` as well: no call of ours for each sample.
        window, use_log, fine, least = self._window, self._use_log, self._fine, self._min_samples
        ordered, seen, size = window.ordered, window.values, window.size
        n, center, mad, low = len(ordered), window.median, window.mad, window.nearest
        few, far = max(quiet.low, fine.low), min(quiet.high, fine.high)
        found: Found = ()
        normal: float | None = None
        at = -1
        for value in values:
            at += 1
            place = value
            if use_log:
                place = log(value) if value > 0.0 else -inf
            score: float | None = None
            if n >= least:
                # Changes with each sample while the window fills, and never again.
                if n != self._factor_n:
                    self._factor_n, self._factor = n, widening_mad(n)
                scale = MAD_TO_SIGMA * mad
                if scale > (FLOOR if use_log else FLOOR * abs(center)) and place > -inf and ordered[0] > -inf:
                    score, normal = (place - center) / (scale * self._factor), center
                else:
                    window.median, window.mad = center, mad
                    (score, self.normal), normal = self._raw(value), None
                if found or not few <= score <= far:
                    if normal is not None:
                        self.normal, normal = exp(normal) if use_log else normal, None
                    if self._log_ratio and not fine.low <= score <= fine.high:
                        score = 0.0 if self._apart(steps, at) else self._far_enough(score, value, self.normal or 0.0)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
            if use_log:
                self._values.append(value)
            # -- the window learns it
            if n == size:
                del ordered[bisect_left(ordered, seen.popleft())]
            else:
                n += 1
            seen.append(place)
            insort(ordered, place)
            half = n >> 1
            center = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])
            k = (n + 1) >> 1
            last = n - k
            if low > last:
                low = last
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
            mad = left if left > right else right
            if not n & 1:
                if not low:
                    mad = 0.5 * (mad + ordered[k] - center)
                else:
                    mad = 0.5 * (mad + (before if before < after else after))
        window.median, window.mad, window.nearest = center, mad, low
        if self._log_ratio:
            self._steps.extend(steps)
        if normal is not None:
            self.normal = exp(normal) if use_log else normal
        return found

    def _update_choosing(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        """The same where not every sample is learnt as it is."""
        window, use_log = self._window, self._use_log
        found: Found = ()
        at = -1
        for value in values:
            at += 1
            place = value
            if use_log:
                place = log(value) if value > 0.0 else -inf
            score = raw = None
            n = len(window.ordered)
            if n >= self._min_samples:
                # Changes with each sample while the window fills, and never again.
                if n != self._factor_n:
                    self._factor_n, self._factor = n, widening_mad(n)
                if not use_log or (value > 0.0 and window.ordered[0] > -inf):
                    center, scale = window.median, MAD_TO_SIGMA * window.mad
                    if use_log:
                        normal, floor = exp(center), FLOOR
                    else:
                        normal, floor = center, FLOOR * abs(center)
                    # The usual case is written out here; what else there is says `_raw`.
                    score = (place - center) / (scale * self._factor) if scale > floor else self._raw(value)[0]
                else:
                    score, normal = self._raw(value)
                self.normal = normal
                raw = score
                if self._log_ratio and not self._fine.low <= score <= self._fine.high:
                    score = 0.0 if self._apart(steps, at) else self._far_enough(score, value, normal)
            learnt, afresh = self._learning.admit(value, raw, self._streak, self._raw_bound)
            if afresh:
                self._fill(learnt)
            else:
                for one in learnt:
                    self._push(one)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        if self._log_ratio:
            self._steps.extend(steps)
        return found

    def _raw(self, value: float) -> tuple[float, float]:
        """The score of a value without ``min_ratio``, and the median that it is compared with."""
        window, place = self._window, value
        in_logs = self._use_log and value > 0.0 and window.ordered[0] > -inf
        if in_logs:
            place = log(value)
        elif self._use_log:
            window = self._plain_values()
        center, scale = self._center_and_scale(window, in_logs)
        return _in_scales(place - center, scale), exp(center) if in_logs else center

    def _plain_values(self) -> SortedWindow:
        """The values of a window of logarithms."""
        window = SortedWindow(self._window.size, with_mad=True)
        window.fill(self._values)
        return window

    def _center_and_scale(self, window: SortedWindow, in_logs: bool) -> tuple[float, float]:
        center, n = window.median, len(window.ordered)
        # In logarithms 0.1 % of the level is a distance of 0.001.
        scale = max(MAD_TO_SIGMA * window.mad, FLOOR if in_logs else FLOOR * abs(center))
        if scale == 0.0:
            scale = MEAN_DEVIATION_TO_SIGMA * sum(abs(v - center) for v in window.ordered) / n
        return center, scale * widening_mad(n)

    # -- min_ratio --------------------------------------------------------------------

    def _far_enough(self, score: float, value: float, normal: float) -> float:
        """The score of a value that breaches, unless its ratio to the median is too small for that."""
        breaches = self._learning.breaches
        if normal == 0.0:
            return 0.0  # half of the window is nothing, as of a margin that is mostly kept: no value is a ratio of that
        if not breaches(score) or normal <= 0.0 or value <= 0.0:
            return score
        ratio = value / normal
        share = abs(log(ratio)) / self._log_ratio if ratio > 0.0 else inf  # 0.0: too small for a float
        if share >= 1.0:
            return 0.0 if self._is_usual(value, normal) else score
        limit = breaches.healthy.high if score > 0.0 else breaches.healthy.low
        return share * limit if isfinite(limit) else 0.0

    def _apart(self, steps: Sequence[int], at: int) -> bool:
        """Whether the sample at a position of these steps, of which none is known yet, is far from the one before it."""
        known = [*self._steps, *steps[: at + 1]][-self._window.size :]
        distances = sorted(step - before for before, step in pairwise(known))
        return len(distances) > 1 and known[-1] - known[-2] >= APART * max(1, distances[len(distances) // 2])

    def _older_half(self) -> list[float]:
        """The older half of the window as a value that breaches leaves it."""
        if self._learning.reseed and len(self._streak) + 1 >= self._learning.reseed:
            return self._streak[: (len(self._streak) + 1) // 2]  # the window starts again from the streak
        seen = self._values if self._use_log else self._window.values
        n, first = len(seen), 0
        if self._learning.outliers != "exclude":
            first = int(n == self._window.size)  # the oldest makes room for it
            n += 1 - first
        return [*islice(seen, first, first + n // 2)]

    def _is_usual(self, value: float, normal: float) -> bool:
        """Whether such values have been a regular part of the window."""
        older = self._older_half()
        half = sqrt(value * normal)
        return sum([(v > half) is (value > normal) for v in older]) >= max(FEW, USUAL * len(older))

    # -- what is published ------------------------------------------------------------

    def bound(self, healthy: Bound) -> Bound | None:
        """Of a sample that comes as soon as those before it."""
        if len(self._window.ordered) < self._min_samples:
            return None
        low, high, normal = self._limits(healthy)
        if not self._log_ratio:
            return exact_bound(lambda v: self._raw(v)[0], healthy, low, high)
        if normal == 0.0:
            return EVERYTHING  # no value is a ratio of nothing, see `_far_enough`
        if normal > 0.0:
            ratio = exp(self._log_ratio)
            older = sorted(self._older_half())
            regular = ceil(max(FEW, USUAL * len(older)))
            if regular <= len(older):
                # Where a value is usual up to: half of the way to it must hold fewer than the regular values.
                most, least = older[-regular], older[regular - 1]
                high = max(high, most * most / normal)
                low = min(low, least * least / normal) if low > 0.0 else low
            high = max(high, normal * ratio)
            low = min(low, normal / ratio) if low > 0.0 else low

        def score(value: float) -> float:
            raw, median = self._raw(value)
            return raw if healthy.holds(raw) else self._far_enough(raw, value, median)

        return exact_bound(score, healthy, low, high)

    def _raw_bound(self, healthy: Bound) -> Bound | None:
        """About where the threshold lies without ``min_ratio``: a value is learnt by what it is, not by what is done."""
        low, high, _ = self._limits(healthy)
        return Bound(low, high)

    def _limits(self, healthy: Bound) -> tuple[float, float, float]:
        """About the values with these scores, without ``min_ratio``; and the median."""
        window = self._window
        in_logs = self._use_log and window.ordered[0] > -inf
        if self._use_log and not in_logs:
            window = self._plain_values()
        center, scale = self._center_and_scale(window, in_logs)
        low, high = center + healthy.low * scale, center + healthy.high * scale
        return (_exp(low), _exp(high), exp(center)) if in_logs else (low, high, center)

    # -- learning ---------------------------------------------------------------------

    def _push(self, value: float) -> None:
        if self._use_log:
            self._values.append(value)
            value = log(value) if value > 0.0 else -inf
        self._window.push(value)

    def _fill(self, values: Sequence[float]) -> None:
        if self._use_log:
            self._values.clear()
            self._values.extend(values)
            values = [log(v) if v > 0.0 else -inf for v in self._values]
        self._window.fill(values)

    def state(self) -> Any:
        seen = self._values if self._use_log else self._window.values
        known = {"window": list(seen), "streak": self._streak[:], "normal": self.normal}
        return known | {"steps": list(self._steps)} if self._log_ratio else known

    def restore(self, state: Any) -> None:
        self._fill(state["window"])
        self._steps.clear()
        self._steps.extend(state.get("steps", ()))
        self._streak, self.normal = list(state["streak"]), state["normal"]


def _exp(number: float) -> float:
    try:
        return exp(number)
    except OverflowError:
        return inf


def compile_zscore(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "zscore")
    window = sample_count(options, "window", 100, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="clip", window=window)
    return CompiledCondition(
        "zscore",
        breaches,
        lambda: ZScore(window, min_samples, learning),
        "{series} {value} is {score:.1f} standard deviations from its recent mean {normal}",
        bounded=breaches.exact,
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


def compile_robust_z(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "robust_z")
    window = sample_count(options, "window", 200, least=2)
    min_samples = max(2, min_samples_of(rule, window))
    learning = Learning(rule, breaches, default="include", window=window)
    use_log, min_ratio = bool(options.get("log", False)), float(options.get("min_ratio", 1.0))
    # Of a value that has no logarithm the plain score is taken: downwards no interval says which values are healthy.
    upward = breaches.healthy.low == -inf
    return CompiledCondition(
        "robust_z",
        breaches,
        lambda: RobustZ(window, min_samples, learning, use_log=use_log, min_ratio=min_ratio),
        "{series} {value} is {score:.1f} robust sigmas from its recent median {normal}",
        bounded=breaches.exact and breaches.healthy.holds(0.0) and (upward or not use_log),
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


ZSCORE = ConditionType(
    "zscore",
    options_schema("(x - mean) / std of the window before x.", window=window_schema()),
    compile_zscore,
    help="Standard deviations from the mean of the window before the sample.",
)

ROBUST_Z = ConditionType(
    "robust_z",
    options_schema(
        "(x - median) / (1.4826 MAD) of the window before x; the scale is at least 0.1 % of the median.",
        window=window_schema(),
        log=flag_schema("Judge logarithms while the whole window is positive: for losses that fall by factors."),
        min_ratio=number_schema(
            "While all is positive, only a value at least this many times above or below the median can breach, and not if"
            " two of the window's older half (or 3 % of it) were at least half as far away (1).",
            minimum=1,
        ),
    ),
    compile_robust_z,
    help="Distance from the median of the window before the sample, in MADs scaled to sigmas.",
)
