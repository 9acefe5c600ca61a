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

Ratios of values around zero mean nothing: a series that has been negative is not judged again, and
zeros are passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import exp, log, pi, sqrt
from typing import Any

from healthcheck.protocols import Condition, ConditionType
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
LOOK_AHEAD = 16
"""Samples for which one sorting of the differences bounds the noise."""
MANY = 32
"""Differences from which on their median is taken."""
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
        "_differences",
        "_fell",
        "_first",
        "_last",
        "_min_samples",
        "_negative",
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
        self._differences: deque[float] = deque(maxlen=NOISE_WINDOW + LAG)
        """Of the logarithms of neighbours; the noise is taken from all but the newest."""
        self._small, self._small_until = 1.0, 0
        """Ratios up to the first are within the noise, as long as there are no more samples than the second."""
        self._count = 0
        self._last = self._first = self._best = 0.0
        self._best_at = 0
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
            self._differences.append(abs(log(value / self._last)))
        self._last = value
        level = recent.median()
        best = self._best
        if level < best or count == 1:
            if count == 1:
                self._first = level
            best = self._best = self.normal = level
            self._best_at = count
        if count < self._min_samples:
            return None
        ratio = level / best
        if ratio <= self._small and (count <= self._small_until or ratio == 1.0):
            return 1.0
        return ratio if self._turned(ratio) else 1.0

    def _turned(self, ratio: float) -> bool:
        if self._best > self._first * (1.0 - self._fell):
            return False
        if self._count - self._best_at < self._behind * self._count:
            return False
        if not self._sigmas:
            return True
        if len(self._differences) <= LAG:
            return False
        asked = self._sigmas * (1.0 + 1.0 / sqrt(len(self._recent.ordered)))
        return log(ratio) > asked * max(NOISE_FLOOR, self._noise(asked))

    def _noise(self, asked: float) -> float:
        """The usual difference of neighbours, as an estimate of the standard deviation of one of them.

        One new difference moves each order statistic by one rank at most: that bounds what the noise can
        fall to in the next samples, and with it the ratios that need not be looked at.
        """
        n = len(self._differences) - LAG
        settled = list(self._differences)[:n]
        if n < MANY:
            return MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n
        settled.sort()
        half = n >> 1
        if n == NOISE_WINDOW and len(self._recent.ordered) == self._smooth:
            least = max(NOISE_FLOOR, DIFFERENCE_TO_SIGMA * settled[half - 1 - LOOK_AHEAD])
            self._small = exp(asked * least) * (1.0 - 1e-9)
            self._small_until = self._count + LOOK_AHEAD
        return DIFFERENCE_TO_SIGMA * (settled[half] if n & 1 else 0.5 * (settled[half - 1] + settled[half]))

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": list(self._differences),
            "numbers": [self._count, self._last, self._first, self._best, self._best_at, self._negative],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._first, self._best, self._best_at, self._negative = state["numbers"]
        self.normal = self._best if self._count else None
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        self._differences.clear()
        self._differences.extend(float(d) for d in state["differences"])
        self._small, self._small_until = 1.0, 0


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
