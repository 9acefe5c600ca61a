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
from math import log, pi, sqrt
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
        "_newest",
        "_recent",
        "_sigmas",
        "_smooth",
        "normal",
    )

    def __init__(self, min_samples: int, *, smooth: int, sigmas: float, fell: float, behind: float) -> None:
        self.normal: float | None = None
        self._min_samples = min_samples
        self._smooth, self._sigmas, self._fell, self._behind = smooth, sigmas, fell, behind
        self._recent = SortedWindow(1)
        self._differences = SortedWindow(NOISE_WINDOW)
        self._newest: deque[float] = deque()
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
        self._count += 1
        # An eighth of the samples grows by one every eighth sample: the window never has to forget two at once.
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.push(value)
        if self._sigmas and self._count > 1:
            self._newest.append(abs(log(value / self._last)))
            if len(self._newest) > LAG:
                self._differences.push(self._newest.popleft())
        self._last = value
        level = self._recent.median()
        if self._count == 1:
            self._first = level
        best = self._best
        if self._count == 1 or level < best:
            self._best = self.normal = level
            self._best_at = self._count
            best = level
        if self._count < self._min_samples:
            return None
        return level / best if self._turned(level / best) else 1.0

    def _turned(self, ratio: float) -> bool:
        if self._best > self._first * (1.0 - self._fell):
            return False
        if self._count - self._best_at < self._behind * self._count:
            return False
        if not self._sigmas:
            return True
        if not len(self._differences):
            return False
        asked = self._sigmas * (1.0 + 1.0 / sqrt(len(self._recent)))
        return log(ratio) > asked * max(NOISE_FLOOR, self._noise())

    def _noise(self) -> float:
        differences = self._differences
        n = len(differences)
        if n < MANY:
            return MEAN_DIFFERENCE_TO_SIGMA * sum(differences.values) / n
        return DIFFERENCE_TO_SIGMA * differences.median()

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": [list(self._differences.values), list(self._newest)],
            "numbers": [self._count, self._last, self._first, self._best, self._best_at, self._negative],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._first, self._best, self._best_at, self._negative = state["numbers"]
        self.normal = self._best if self._count else None
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        old, newest = state["differences"]
        self._differences.fill(old)
        self._newest = deque(newest)


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
