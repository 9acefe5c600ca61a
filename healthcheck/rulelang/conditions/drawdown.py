"""``drawdown``: what should rise, such as a reward, has lost what it had gained.

The *level* is the median of the newest samples, an eighth of all so far and at most ``smooth`` of them, as in
``rebound``. The score is how far it lies below the highest level so far, divided by what had been gained until then: the
highest level less the lowest one before it. 1 is back at the start, more than 1 below it. Unlike the ratios of ``rebound`` it
holds for values of any sign. The peak is never forgotten: a reward that fell and stays is as bad after a thousand samples.

The better quarter of the newest samples must lie below the worse quarter of those that made the peak. A peak of one or
two samples counts if those before it were nearly as good (a lucky episode is no level), and a fall must be deeper than one that
was made good before. What has lasted is over when the level is half way back.

``sigmas`` keeps noise apart: while the fall is no more than so many times the scatter of single samples, the score is 0. While
the level or the peak is a single sample, twice as much is asked for, since both are extremes. Scatter is measured between neighbours and,
since averages over the last episodes resemble theirs, a level apart, each by differences of differences. A series that had gained
nothing to speak of is measured by that scatter: a fall from a level that was there from the start counts as well.

The maximum drawdown of finance, relative to the gain (Magdon-Ismail and Atiya, "Maximum drawdown", 2004); the peak
is what an early stop would have kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    OptionError,
    UnboundedScorer,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import SortedWindow
from healthcheck.rulelang.conditions.rebound import SHARE, NeighbourNoise

FEWEST_DIFFERENCES = 3
"""Settled differences of neighbours from which on their scatter is known."""
ALWAYS, ANEW = 32, 16
"""The scatter is measured at each of the first samples, then at one in so many."""
NORMAL_TURN = 0.512
"""The standard deviation of normal values over the mean size of x - 2 y + z of three of them: sqrt(pi / 12)."""
LEAST_SCATTER = 0.01
"""Scatter is at least this share of the peak: a reward that wavers by less stands still."""
SETTLED = 4
"""Samples in the level from which on a fall counts where nothing to speak of had been gained before it."""
MANY = 16
"""Samples in a level up to which its fall is measured by the scatter of single samples."""
LASTING = 8
"""Samples below the best ones from which on single good samples do not end a fall."""


class Drawdown(UnboundedScorer):
    """Score: (highest level - level) / (highest level - lowest level before it); 0 within the noise."""

    __slots__ = (
        "_beside",
        "_count",
        "_deepest",
        "_fallen",
        "_far",
        "_far_jumps",
        "_fars",
        "_for",
        "_jumps",
        "_last",
        "_lowest",
        "_lowest_since",
        "_min_samples",
        "_moved_by",
        "_moves",
        "_newest",
        "_noise",
        "_peak",
        "_peak_of",
        "_peak_worse",
        "_recent",
        "_scatter",
        "_sigmas",
        "_smooth",
        "_span",
        "_trough",
        "_turned",
        "_wandered",
        "normal",
    )

    def __init__(self, min_samples: int, *, smooth: int, sigmas: float) -> None:
        self.normal: float | None = None
        self._min_samples, self._smooth, self._sigmas = min_samples, smooth, sigmas
        self._recent = SortedWindow(1)
        self._noise = NeighbourNoise()
        """Of differences as they are, not of logarithms."""
        self._count = 0
        self._last = self._peak = self._trough = self._lowest = 0.0
        """The newest value, the highest level, the lowest before it, and the lowest of all."""
        self._peak_worse, self._peak_of = 0.0, 1
        """The worse quarter of the samples that made the highest level, and how many these were."""
        self._scatter: float | None = None
        """Of single samples; None while it is not known."""
        self._moved_by, self._moves = 0.0, 0
        """The newest difference of neighbours, and how many there were."""
        self._turned, self._jumps = 0.0, (0.0, 0.0)
        """The sum of all differences of differences, and the two largest of them."""
        self._span: deque[float] = deque(maxlen=2 * smooth + 1)
        self._far, self._fars = 0.0, 0
        """The sum of differences of differences a level apart, and how many there were."""
        self._far_jumps: list[float] = []
        """The largest of them, which may be the fall itself."""
        self._lowest_since, self._wandered = 0.0, 0.0
        """The lowest level since the highest, and the deepest fall that was made good."""
        self._newest: deque[float] = deque(maxlen=SETTLED)
        self._beside = 0.0
        """The median of the newest samples when the highest level was reached."""
        self._for, self._deepest = 0, 0.0
        """For how many samples it has been fallen, and how far at most."""
        self._fallen = False
        """Whether the level lies below the peak by more than the noise: what the fall does is no noise."""

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        recent = self._recent
        ordered, push = recent.ordered, recent.push
        differences = self._noise.differences
        found: Found = ()
        for value in values:
            count = self._count = self._count + 1
            if recent.size < self._smooth:
                recent.size = max(1, min(self._smooth, count // SHARE))
            push(value)
            self._newest.append(value)
            self._span.append(value)
            level = recent.median
            if count == 1:
                self._peak = self._peak_worse = self._trough = self._lowest = self._lowest_since = self.normal = level
            else:
                if not self._fallen:
                    differences.append(value - self._last)
                    # Of differences of differences: a steady rise is no scatter.
                    difference = value - self._last
                    if self._moves:
                        turn = abs(difference - self._moved_by)
                        self._turned += turn
                        if turn > self._jumps[0]:
                            self._jumps = (turn, self._jumps[0])
                        elif turn > self._jumps[1]:
                            self._jumps = (self._jumps[0], turn)
                    self._moved_by = difference
                    self._moves += 1
                    lag = len(ordered)
                    if len(self._span) > 2 * lag:
                        turned = abs(value - 2.0 * self._span[-lag - 1] + self._span[-2 * lag - 1])
                        self._far += turned
                        self._fars += 1
                        self._far_jumps = sorted((*self._far_jumps, turned))[-2:]
                    if count <= ALWAYS or not count % ANEW:
                        self._scatter = self._noise.usual() if self._noise.known >= FEWEST_DIFFERENCES else None
                if level < self._lowest:
                    self._lowest = level
                if level >= self._peak:
                    # A fall that was made good says how far this series wanders.
                    self._wandered = max(self._wandered, self._peak - self._lowest_since)
                    self._lowest_since = level
                elif level < self._lowest_since:
                    self._lowest_since = level
                if level > self._peak:
                    self._peak = self.normal = level
                    self._beside = median(self._newest)
                    self._peak_worse, self._peak_of = ordered[len(ordered) // 4], len(ordered)
                    self._trough = self._lowest
            self._last = value
            score: float | None = None
            if count >= self._min_samples and self._scatter is not None:
                fall, gain = self._peak - level, self._peak - self._trough
                # The usual difference of sparse rewards is 0; the mean one is not. The two largest may be the fall itself.
                mean = NORMAL_TURN * (self._turned - sum(self._jumps)) / self._moves
                # Averages over the last episodes resemble their neighbours: how far they wander shows a level apart.
                apart = NORMAL_TURN * (self._far - sum(self._far_jumps)) / self._fars if self._fars else 0.0
                scatter = max(self._scatter, mean, apart, LEAST_SCATTER * abs(self._peak))
                n = len(ordered)
                asked = self._sigmas * (1.0 + 1.0 / sqrt(min(n, self._peak_of))) * scatter
                # Medians of many samples are surer than the samples.
                if n > MANY:
                    asked *= sqrt(MANY / n)
                # The better quarter must have fallen as well, and below the worse quarter of the best ones: episodes of
                # exploration are bad ones among good ones, and the best level of sparse rewards is a few lucky ones.
                better = ordered[3 * n // 4]
                fallen = fall > 0.0 and self._peak - better > asked and better < self._peak_worse
                # A best level of one or two samples is a lucky episode unless those before it were nearly as good.
                fallen = fallen and (self._peak_of >= SETTLED or self._beside - better > 0.5 * fall)
                fallen = fallen and (gain > asked or n >= SETTLED) and fall > self._wandered
                # What has lasted is over when the level is half way back, not when the newest quarter is luckier once.
                self._for = self._for + 1 if fallen or (self._for >= LASTING and fall > 0.5 * self._deepest) else 0
                self._deepest = max(self._deepest, fall) if self._for else 0.0
                self._fallen = self._for > 0
                score = fall / max(gain, asked, scatter) if self._fallen else 0.0
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": list(self._noise.differences),
            "numbers": [self._count, self._last, self._peak, self._trough, self._lowest, self._peak_worse],
            "found": [self.normal, self._fallen, self._scatter],
            "moved": [self._moved_by, self._moves, self._turned, *self._jumps, self._peak_of],
            "far": [self._far, self._fars, *self._far_jumps],
            "span": list(self._span),
            "wandered": [self._lowest_since, self._wandered, self._for, self._deepest, self._beside, *self._newest],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._peak, self._trough, self._lowest, self._peak_worse = state["numbers"]
        self.normal, self._fallen, self._scatter = state["found"]
        self._moved_by, self._moves, self._turned, first, second, self._peak_of = state["moved"]
        self._jumps = (first, second)
        self._lowest_since, self._wandered, self._for, self._deepest, self._beside, *newest = state["wandered"]
        self._newest = deque(newest, maxlen=SETTLED)
        self._far, self._fars, *self._far_jumps = state["far"]
        self._span = deque(state["span"], maxlen=2 * self._smooth + 1)
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        self._noise.differences.clear()
        self._noise.differences.extend(float(d) for d in state["differences"])


def compile_drawdown(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "drawdown")
    if breaches.direction <= 0 or breaches.high is None or breaches.high < 0.0:
        raise OptionError("the drawdown is a share of the gain, from 0; compare it with `above: ...`, such as 50%")
    smooth = sample_count(options, "smooth", 32)
    sigmas = float(options.get("sigmas", 0.0))
    min_samples = max(2, min_samples_of(rule, 1_000_000, default=8))
    return CompiledCondition(
        "drawdown",
        breaches,
        lambda: Drawdown(min_samples, smooth=smooth, sigmas=sigmas),
        "{series} {value} has lost {score:.0%} of what it had gained up to {normal}",
        baseline=True,
        min_samples=min_samples,
        window=smooth,
    )


DRAWDOWN = ConditionType(
    "drawdown",
    options_schema(
        "The share of its gain that a value has lost: its level (median of an eighth of the samples so far) against the highest so far.",
        smooth=window_schema("Samples in the median, at most (32).", least=1),
        sigmas=number_schema("The fall must exceed so many times the scatter of neighbours (0).", minimum=0),
    ),
    compile_drawdown,
    help="What should rise has lost what it had gained.",
)
