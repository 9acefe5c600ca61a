"""``rebound``: a value that had come down and goes up again, however densely it is logged.

The *level* is the median of the newest samples, an eighth of all so far and at most ``smooth`` of
them: one sample where a run has ten, 32 where it has thousands. The score is the level divided by
the lowest level so far: the generalisation loss of early stopping (Prechelt, "Early stopping - but
when?", 1998), and with ``sigmas`` the alarm of Page's test (Page, "Continuous inspection schemes",
1954), which also watches the distance from the lowest point so far.

Three demands keep apart what looks alike; while one is not met the score is 1:

``fell``    the lowest level lies this far below the first one. A loss that has only ever risen
            (a penalty that is annealed, targets that grow) has not turned round.
``behind``  the lowest level is this share of all samples back: a dip is not a trend.
``sigmas``  the rise, in logarithms, is this many times the noise: the median absolute difference
            of neighbours, which a trend does not enlarge (von Neumann 1941, with medians). Of few
            differences the mean is taken: their median is too small by chance too often. The last
            two stay out: a jump is not its own noise. While the level is a single sample, twice as
            much is asked for, because both it and the lowest so far are extremes: 1 + 1/sqrt(m)
            times, where the level is the median of m.

With ``sigmas`` a new level is told from a rise, see ``newlevel.py``: harder data, longer sequences or
another weight in the loss lift it from one sample to the next and let it stay or fall, and the lowest
level is then sought anew. And while the level is a single sample, the lowest is the higher of two
neighbours, where every step is seen: one window of accumulation that is shorter than the others makes one small loss.

Ratios of values around zero mean nothing: a series that has been negative is not judged again, and
zeros are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from math import exp, inf, log, pi, sqrt
from typing import Any

from healthcheck.protocols import Condition, ConditionType, Promise
from healthcheck.rulelang.conditions.base import (
    QUANTITY,
    Compiled,
    OptionError,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.foresight import EVER, ROUNDING, median_within, narrowed
from healthcheck.rulelang.conditions.newlevel import shift_in
from healthcheck.rulelang.conditions.windows import MAD_TO_SIGMA, SortedWindow
from healthcheck.rulelang.quantities import QuantityError, parse_quantity

SHARE = 8
"""The level is the median of one sample in so many of those so far."""
NOISE_WINDOW = 64
"""Neighbouring differences that the noise is taken from."""
NOISE_FLOOR = 0.002
"""Noise is at least this share of the level."""
LAG = 2
"""Newest differences that are no part of the noise yet."""
FORESEEN = 12
"""Samples for which a level and its noise are foreseen."""
LOOK_AHEAD = 16
"""Samples for which one sorting of the differences bounds the noise."""
MANY = 32
"""Differences from which on their median is taken."""
DENSE = 2
"""Steps between two samples up to which a jump from one to the next is a jump, and no rise that was not seen."""
FEW = 3
"""Samples in the level from which on one small value is not the lowest."""
DIFFERENCE_TO_SIGMA = MAD_TO_SIGMA / sqrt(2.0)
"""The difference of two samples has twice the variance of one."""
MEAN_DIFFERENCE_TO_SIGMA = sqrt(pi) / 2.0


class Rebound:
    """Score: level / lowest level so far; 1 while one of the demands is not met."""

    __slots__ = (
        "_behind",
        "_best",
        "_best_at",
        "_count",
        "_dense_since",
        "_differences",
        "_fell",
        "_first",
        "_last",
        "_last_level",
        "_last_step",
        "_lowest",
        "_min_samples",
        "_negative",
        "_recent",
        "_sigmas",
        "_small",
        "_small_until",
        "_smooth",
        "_sure_until",
        "normal",
    )

    def __init__(self, min_samples: int, *, smooth: int, sigmas: float, fell: float, behind: float) -> None:
        self.normal: float | None = None
        self._min_samples = min_samples
        self._smooth, self._sigmas, self._fell, self._behind = smooth, sigmas, fell, behind
        self._recent = SortedWindow(1)
        self._differences: deque[float] = deque(maxlen=NOISE_WINDOW + LAG)
        """Of the logarithms of neighbours, with their sign; the noise is taken from all but the newest."""
        self._small, self._small_until = 1.0, 0
        """Ratios up to the first are within the noise, as long as there are no more samples than the second."""
        self._sure_until = 0
        """Up to so many samples no rise can be more than noise."""
        self._count = 0
        self._last = self._last_level = self._first = self._best = self._lowest = 0.0
        self._best_at = 0
        self._last_step = self._dense_since = 0
        """The step of the newest sample, and the number of the sample from which on there was none far apart."""
        self._negative = False

    def update(self, value: float, step: int) -> float | None:
        level = self._learn(value, step)
        count = self._count
        if level is None or count < self._min_samples:
            return None
        best = self._best
        ratio = level / best if level > best else 1.0
        if ratio <= self._small and (count <= self._small_until or ratio == 1.0):
            return 1.0
        return ratio if self._turned(ratio) else 1.0

    def _learn(self, value: float, step: int) -> float | None:
        """Take a value; the level that it makes, or None if this series is not judged by it.

        ``_learn_all`` does the same for many: what changes here changes there.
        """
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
            self._differences.append(log(value / self._last))
            if step - self._last_step > DENSE:
                self._dense_since = count
        self._last, self._last_step = value, step
        level = low = recent.median()
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
            self._best = self.normal = low
            self._best_at = count
        return level

    def foresee(self, last: float, low: float, high: float) -> Promise | None:
        """While no level can be so far above the lowest one, or so far above the noise."""
        if self._negative or self._count < self._min_samples or low >= 1.0 or high <= 1.0:
            return None
        ordered, best = self._recent.ordered, self._best
        floor = 0.5 * min(ordered[0], best)
        if ordered[-1] < high * floor:
            return (*narrowed(floor, high * floor), EVER)
        for count in (FORESEEN, FORESEEN // 2):
            if self._within_noise(count):
                return 0.0, inf, count
            levels = median_within(ordered, count)
            if levels is not None and levels[1] / min(levels[0], best) < high * (1.0 - ROUNDING):
                return 0.0, inf, count
        return None

    def _within_noise(self, count: int) -> bool:
        """Whether no rise in the next samples can be more than noise, whatever they are: then the score is 1."""
        if self._count + count > self._sure_until:
            levels = median_within(self._recent.ordered, count)
            if levels is None or levels[1] / min(levels[0], self._best) >= self._noisy(count):
                return False
            self._sure_until = self._count + count
        return True

    def _noisy(self, count: int) -> float:
        """Ratios up to this will be within the noise for the next ``count`` samples."""
        n = len(self._differences) - LAG
        if not self._sigmas or n < MANY:
            return 1.0
        settled = sorted(map(abs, islice(self._differences, n)))
        noise = max(NOISE_FLOOR, DIFFERENCE_TO_SIGMA * settled[((n - 1) >> 1) - count])
        asked = self._sigmas * (1.0 + 1.0 / sqrt(max(self._smooth, len(self._recent.ordered))))
        return exp(asked * noise) * (1.0 - ROUNDING)

    def skim(self, values: Sequence[float], steps: Sequence[int], low: float, high: float) -> int:
        count = min(len(values), FORESEEN)
        values, steps = values[:count], steps[:count]
        if not self._within_noise(count):
            if low > -inf or high < inf:
                return 0
            for value, step in zip(values, steps, strict=True):
                self.update(value, step)  # a rise may turn out to be a new level, which is more than to learn a value
            return count
        if not low <= 1.0 <= high:
            return 0
        full = len(self._recent.ordered) == self._smooth >= FEW
        if not full or self._negative or min(values) <= 0.0:
            for value, step in zip(values, steps, strict=True):
                self._learn(value, step)
        else:
            self._learn_all(values, steps)
        return count

    def _learn_all(self, values: Sequence[float], steps: Sequence[int]) -> None:
        """``_learn`` for positive values, once the window has its full length."""
        if self._sigmas:
            before = self._last
            for value in values:
                self._differences.append(log(value / before))
                before = value
            gaps = [at - earlier for earlier, at in zip([self._last_step, *steps], steps, strict=False)]
            if max(gaps) > DENSE:
                self._dense_since = self._count + max(i for i, gap in enumerate(gaps, 1) if gap > DENSE)
        self._last, self._last_step = values[-1], steps[-1]
        best = self._best
        levels = self._recent.medians(values)
        for count, level in enumerate(levels, self._count + 1):
            if level < best:
                best = self._best = self.normal = level
                self._best_at = count
        self._lowest = min(self._lowest, *levels)
        self._count += len(values)

    def _turned(self, ratio: float) -> bool:
        if self._lowest > self._first * (1.0 - self._fell):
            return False
        if self._count - self._best_at < self._behind * self._count:
            return False
        if not self._sigmas:
            return True
        if len(self._differences) <= LAG:
            return False
        asked = self._sigmas * (1.0 + 1.0 / sqrt(len(self._recent.ordered)))
        noise = max(NOISE_FLOOR, self._noise(asked))
        if log(ratio) <= asked * noise:
            return False
        return self._recent.size < FEW or not self._shifted(noise)

    def _shifted(self, noise: float) -> bool:
        """Whether a new level explains the rise, or may yet; once it does, the lowest level is sought from it on."""
        since = self._count - max(self._dense_since, self._best_at - self._smooth // 2)
        jumps = list(self._differences)[-since:] if since > 0 else []
        shift = shift_in(jumps, self._last, noise, best=self._best, first=self._first)
        if shift is None:
            return False
        if shift.settled:
            self._recent.fill(shift.values)
            self._best = self.normal = self._last_level = self._recent.median()
            self._best_at = self._count + self._smooth // 2  # so that this jump is not looked at again
            self._small_until = self._sure_until = 0
        return True

    def _noise(self, asked: float) -> float:
        """The usual difference of neighbours, as an estimate of the standard deviation of one of them.

        One new difference moves each order statistic by one rank at most: that bounds what the noise can
        fall to in the next samples, and with it the ratios that need not be looked at.
        """
        n = len(self._differences) - LAG
        settled = [*map(abs, islice(self._differences, n))]
        if n < MANY:
            return MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n
        settled.sort()
        half = n >> 1
        if n == NOISE_WINDOW and len(self._recent.ordered) == self._smooth:
            least = max(NOISE_FLOOR, DIFFERENCE_TO_SIGMA * settled[half - 1 - LOOK_AHEAD])
            self._small = exp(asked * least) * (1.0 - 1e-9)
            self._small_until = self._count + LOOK_AHEAD
        noise = DIFFERENCE_TO_SIGMA * (settled[half] if n & 1 else 0.5 * (settled[half - 1] + settled[half]))
        if settled[n >> 2] == 0.0:
            return max(noise, MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n)  # many ties: a log rounds its values
        return noise

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": list(self._differences),
            "numbers": [self._count, self._last, self._first, self._best, self._best_at, self._negative],
            "places": [self._last_step, self._dense_since, self._last_level, self._lowest],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._first, self._best, self._best_at, self._negative = state["numbers"]
        self._last_step, self._dense_since, self._last_level, self._lowest = state["places"]
        self.normal = self._best if self._count else None
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        self._differences.clear()
        self._differences.extend(float(d) for d in state["differences"])
        self._small, self._small_until, self._sure_until = 1.0, 0, 0


def compile_rebound(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "rebound")
    if breaches.high is None or breaches.low is not None or breaches.high < 1.0:
        raise OptionError("the rebound score is a factor that starts at 1; compare it with `above: ...`, such as 1.05")
    smooth = sample_count(options, "smooth", 32)
    sigmas = float(options.get("sigmas", 0.0))
    fell, behind = _share(options, "fell"), _share(options, "behind")
    min_samples = max(2, min_samples_of(rule, 1_000_000, default=2))
    return Compiled(
        "rebound",
        breaches,
        lambda: Rebound(min_samples, smooth=smooth, sigmas=sigmas, fell=fell, behind=behind),
        "{series} {value} is back at {score:.2f} times its lowest level {normal}",
        baseline=True,
        min_samples=min_samples,
        window=smooth,
    )


def _share(options: Mapping[str, Any], key: str) -> float:
    try:
        share = parse_quantity(options.get(key, 0.0))
    except QuantityError as error:
        raise OptionError(str(error), key) from None
    if not 0.0 <= share < 1.0:
        raise OptionError(f"`{key}` is a share from 0 to below 1, such as 5%", key)
    return share


REBOUND = ConditionType(
    "rebound",
    options_schema(
        "The level (median of an eighth of the samples so far) divided by the lowest level so far.",
        smooth=window_schema("Samples in the median, at most (32).", least=1),
        sigmas=number_schema("The rise must exceed so many times the noise between neighbours (0).", minimum=0),
        fell={
            "description": "How far the lowest level must lie below the first one: 5% (0).",
            "allOf": [QUANTITY],
        },
        behind={
            "description": "How far back the lowest level must lie, as a share of all samples so far: 25% (0).",
            "allOf": [QUANTITY],
        },
    ),
    compile_rebound,
    help="A value that had come down and goes up again, however densely it is logged.",
)
