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
``sigmas``  the rise, in logarithms, is this many times the noise, see :class:`NeighbourNoise`. While the level
            is a single sample, twice as much is asked for, because both it and the lowest so far are
            extremes: 1 + 1/sqrt(m) times, where the level is the median of m.

Where the level has been as high twice in the younger half of the series and come back, easy and hard data take turns:
then it is the upper envelope that must rise, and the score is 1 until the level is higher than those high points.

With ``sigmas`` a new level is kept apart from a rise, see :func:`shift_in`: harder data, longer sequences or
another weight in the loss lift it from one sample to the next and let it stay or fall, and the lowest
level is then sought anew. Tasks that take turns, each with a loss of its own, have been as high before. And while the level is a single sample, the lowest is the higher of two
neighbours, where every step is seen: one window of accumulation that is shorter than the others makes one small loss.

Ratios of values around zero mean nothing: a series that has been negative is not judged again, and
zeros are passed over.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, pairwise
from math import exp, log, pi, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.conditions.base import (
    QUANTITY,
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
from healthcheck.rulelang.conditions.baselines import MAD_TO_SIGMA, SortedWindow
from healthcheck.rulelang.quantities import QuantityError, parse_quantity

# --------------------------------------------------------------------------- the scorer

SHARE = 8
"""The level is the median of one sample in so many of those so far."""
NOISE_FLOOR = 0.002
"""Noise is at least this share of the level."""
LOOK_AHEAD = 16
"""Samples for which one sorting of the differences bounds the noise."""
ROUNDING = 1e-9
"""The bound is narrower by this share, for the sake of rounding errors."""
DENSE = 1
"""Steps between two samples up to which a jump from one to the next is a jump, and no rise that was not seen."""
GLIDE = 20
"""Samples after the lowest for which a steep fall before it explains a rise: momentum of 0.9 has forgotten it then."""
STEEPER = 3.0
"""The fall is steep if it was more than so many times the rise, in logarithms, over as many samples."""
SWING = 0.1
"""A rise that soon after the lowest is a swing, too, if it takes back less than this share of all that was won."""
TURNS = 3
"""Times that values as high came before, with low ones between, from which on they are a regular part of the series."""
STRETCH = 1.15
"""The level has gone up if it is so many times its low point, and come back once it has lost half of that, in logarithms."""
STRETCHES = 2
"""Times that it has been as high and come back, in the younger half of the series, from which on easy and hard data take turns."""
KEPT = 8
"""High points that are remembered."""
WIDE = 3
"""Samples in the level from which on one small value is not the lowest."""


class Rebound(UnboundedScorer):
    """Score: level / lowest level so far; 1 while one of the demands is not met."""

    __slots__ = (
        "_behind",
        "_best",
        "_best_at",
        "_count",
        "_dense_since",
        "_fell",
        "_first",
        "_last",
        "_last_level",
        "_last_step",
        "_lowest",
        "_min_samples",
        "_negative",
        "_noise",
        "_peak",
        "_peaks",
        "_recent",
        "_sigmas",
        "_small",
        "_small_until",
        "_smooth",
        "_trough",
        "_up",
        "normal",
    )

    def __init__(self, min_samples: int, *, smooth: int, sigmas: float, fell: float, behind: float) -> None:
        self.normal: float | None = None
        self._min_samples = min_samples
        self._smooth, self._sigmas, self._fell, self._behind = smooth, sigmas, fell, behind
        self._recent = SortedWindow(1)
        self._noise = NeighbourNoise()
        self._small, self._small_until = 1.0, 0
        """Ratios up to the first are within the noise, as long as there are no more samples than the second."""
        self._count = 0
        self._last = self._last_level = self._first = self._best = self._lowest = 0.0
        self._best_at = 0
        self._last_step = self._dense_since = 0
        """The step of the newest sample, and the number of the sample from which on there was none far apart."""
        self._negative = False
        self._up = False
        self._trough = self._peak = 0.0
        """The low point of the level since it was high, and its high point since it was low."""
        self._peaks: deque[tuple[float, int]] = deque(maxlen=KEPT)
        """High points from which it came back, and the numbers of the samples at which it had."""

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        recent = self._recent
        ordered, seen = recent.ordered, recent.values
        found: Found = ()
        at = 0
        for value in values:
            step = steps[at]
            at += 1
            if value <= 0.0 or self._negative:
                self._negative = self._negative or value < 0.0
                found = found or []
                found.append((None, self.normal))
                continue
            count = self._count = self._count + 1
            if recent.size < self._smooth:
                # An eighth of the samples grows by one every eighth sample: the window never has to forget two at once.
                recent.size = max(1, min(self._smooth, count // SHARE))
            # `SortedWindow.push` written out.
            n = len(ordered)
            if n == recent.size:
                del ordered[bisect_left(ordered, seen.popleft())]
            else:
                n += 1
            seen.append(value)
            insort(ordered, value)
            half = n >> 1
            middle = recent.median = ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])
            if count > 1 and self._sigmas:
                self._noise.differences.append(log(value / self._last))
                if step - self._last_step > DENSE:
                    self._dense_since = count
            self._last, self._last_step = value, step
            level = lowest = middle
            # The upper envelope: where easy and hard data come in stretches, the level goes up and comes back.
            if self._up:
                if middle > self._peak:
                    self._peak = middle
                elif middle * middle < self._peak * self._trough:
                    self._peaks.append((self._peak, count))
                    self._up, self._trough = False, middle
            elif middle < self._trough or count == 1:
                self._trough = middle
            elif middle > STRETCH * self._trough:
                self._up, self._peak = True, middle
            if level < self._lowest or count == 1:
                self._lowest = level
            if recent.size < WIDE and self._sigmas and self._dense_since < count:
                if self._last_level > lowest:
                    lowest = self._last_level
                self._last_level = level
                level = ordered[0]  # nor is a single large one a rise
            best = self._best
            # The first level is what "it had come down" is measured from.
            if lowest < best or count == 1:
                if count == 1:
                    self._first = level
                best = self._best = self.normal = lowest
                self._best_at = count
            score: float | None = None
            if count >= self._min_samples:
                score = level / best if level > best else 1.0
                within_noise = score <= self._small and (count <= self._small_until or score == 1.0)
                if within_noise or not self._turned(score):
                    score = 1.0
                ordered, seen = recent.ordered, recent.values  # others, if a new level was found
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def _turned(self, ratio: float) -> bool:
        # Cheap demands first: the noise is sorted only when nothing else says no.
        if self._lowest > self._first * (1.0 - self._fell):
            return False
        if self._count - self._best_at < self._behind * self._count:
            return False
        level, since = self._best * ratio, self._count // 2
        # Few samples, such as one of each epoch, are means over many batches: none of them is of easy or hard ones.
        many = 2 * self._recent.size >= self._smooth and self._dense_since <= since
        if many:
            came_back = 0
            for peak, at in self._peaks:
                if peak >= level and at > since:
                    came_back += 1
            if came_back >= STRETCHES:
                return False
        if not self._sigmas:
            return True
        known = self._noise.known
        if known < 1:
            return False
        asked = self._sigmas * (1.0 + 1.0 / sqrt(len(self._recent.ordered)))
        if known == NOISE_WINDOW and len(self._recent.ordered) == self._smooth:
            self._small = exp(asked * max(NOISE_FLOOR, self._noise.least(LOOK_AHEAD))) * (1.0 - ROUNDING)
            self._small_until = self._count + LOOK_AHEAD
        noise = max(NOISE_FLOOR, self._noise.usual())
        if log(ratio) <= asked * noise or self._glides(log(ratio)) or self._takes_turns(ratio):
            return False
        return self._recent.size < WIDE or not self._shifted(noise)

    def _glides(self, rise: float) -> bool:
        """Whether momentum has carried the loss past its lowest point: it fell far more just before than it rose since, or
        what it rose by is little of what was won.

        Without noise, as on the full batch, the first swing of Adam is many times what neighbours lie apart. Of a loss
        that is near zero, a swing is many times the lowest level, and still next to nothing.
        """
        known = min(3 * GLIDE, len(self._noise.differences), self._count - self._dense_since)
        path = [
            0.0,
            *accumulate(islice(reversed(self._noise.differences), known)),
        ]  # from the newest value back: fallen
        since = max(range(len(path)), key=path.__getitem__)
        if not 0 < since <= GLIDE:
            return False
        lowest = self._last * exp(-path[since])
        if self._last - lowest < SWING * (self._first - lowest):
            return True
        if len(path) <= 2 * since:
            return False
        return path[since] - path[2 * since] > STEEPER * rise

    def _takes_turns(self, ratio: float) -> bool:
        """Whether values as high as the level came and went before: tasks of different difficulty that take turns.

        A run that diverges is higher than it has been since it came down; one fall from there and one rise are no turns.
        A single turn will do where most values were as high: then the low ones are the exception.
        """
        if self._count - self._dense_since < len(self._noise.differences):
            return False  # evaluations, and rows of a log, are means over many batches: none of them is one task's
        level = log(self._best * ratio)
        half = level - 0.5 * log(ratio)
        newest, turns, low = log(self._last), 0, False
        older = high = 0
        for at, fallen in enumerate(accumulate(reversed(self._noise.differences)), start=1):
            value = newest - fallen
            if at < len(self._recent.ordered):
                continue
            older += 1
            high += value >= level
            if value < half:
                low = True
            elif low and value >= level:
                low, turns = False, turns + 1
        return turns >= TURNS or (turns > 0 and 2 * high > older)

    def _shifted(self, noise: float) -> bool:
        """Whether a new level explains the rise, or may yet; once it does, the lowest level is sought from it on."""
        since = self._count - max(self._dense_since, self._best_at - self._smooth // 2)
        jumps = list(self._noise.differences)[-since:] if since > 0 else []
        shift = shift_in(jumps, self._last, noise, best=self._best, first=self._first)
        if shift is None:
            return False
        if shift.settled:
            self._recent.fill(shift.values)
            self._best = self.normal = self._last_level = self._recent.median
            self._best_at = self._count + self._smooth // 2  # so that this jump is not looked at again
            self._small_until = 0
        return True

    def state(self) -> Any:
        return {
            "recent": list(self._recent.values),
            "differences": list(self._noise.differences),
            "numbers": [self._count, self._last, self._first, self._best, self._best_at, self._negative],
            "envelope": [self._up, self._trough, self._peak, [list(peak) for peak in self._peaks]],
            "places": [self._last_step, self._dense_since, self._last_level, self._lowest, self.normal],
        }

    def restore(self, state: Any) -> None:
        self._count, self._last, self._first, self._best, self._best_at, self._negative = state["numbers"]
        self._last_step, self._dense_since, self._last_level, self._lowest, self.normal = state["places"]
        self._up, self._trough, self._peak, peaks = state.get("envelope", (False, self._last_level, 0.0, ()))
        self._peaks.clear()
        self._peaks.extend((float(peak), int(at)) for peak, at in peaks)
        self._recent.size = max(1, min(self._smooth, self._count // SHARE))
        self._recent.fill(state["recent"])
        self._noise.differences.clear()
        self._noise.differences.extend(float(d) for d in state["differences"])
        self._small, self._small_until = 1.0, 0


# --------------------------------------------------------------------------- noise

NOISE_WINDOW = 64
"""Differences that the noise is taken from."""
LAG = 2
"""Newest differences that are no part of the noise yet."""
MANY = 32
"""Differences from which on their median is taken."""
DIFFERENCE_TO_SIGMA = MAD_TO_SIGMA / sqrt(2.0)
"""The difference of two samples has twice the variance of one."""
MEAN_DIFFERENCE_TO_SIGMA = sqrt(pi) / 2.0
FEW_DIFFERENCES = 6
"""Differences from which on their own differences are looked at."""
MEAN_BEND_TO_SIGMA = sqrt(pi / 12.0)
"""The difference of two differences has six times the variance of one value."""


class NeighbourNoise:
    """The noise of a series of positive values: how far neighbours usually lie apart, in logarithms.

    The median absolute difference of neighbours, which a trend does not enlarge (von Neumann, "Distribution of the
    ratio of the mean square successive difference to the variance", 1941, with medians). Of few differences the mean
    is taken: their median is too small by chance too often. Of few, a steep fall is most of what there is; second
    differences tell it from noise. The newest two stay out: a jump is not its own noise.
    """

    __slots__ = ("differences",)

    def __init__(self) -> None:
        self.differences: deque[float] = deque(maxlen=NOISE_WINDOW + LAG)
        """Of logarithms, with their sign."""

    @property
    def known(self) -> int:
        """Differences that are old enough to count: :data:`NOISE_WINDOW` at most."""
        return len(self.differences) - LAG

    def usual(self) -> float:
        """The noise now; there must be a :attr:`known` difference."""
        n = len(self.differences) - LAG
        settled = [*map(abs, islice(self.differences, n))]
        if n < MANY:
            return self._of_few(settled)
        settled.sort()
        half = n >> 1
        noise = DIFFERENCE_TO_SIGMA * (settled[half] if n & 1 else 0.5 * (settled[half - 1] + settled[half]))
        if settled[n >> 2] == 0.0:
            return max(noise, MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n)  # many ties: a log rounds its values
        return noise

    def _of_few(self, settled: list[float]) -> float:
        """Of few differences, their mean. What bends little is a steep fall and no noise: then the bends tell it."""
        n = len(settled)
        noise = MEAN_DIFFERENCE_TO_SIGMA * sum(settled) / n
        if n < FEW_DIFFERENCES:
            return noise
        bends = sum(abs(b - a) for a, b in pairwise(islice(self.differences, n)))
        return min(noise, MEAN_BEND_TO_SIGMA * bends / (n - 1))

    def least(self, ahead: int) -> float:
        """What the noise cannot fall below with the next ``ahead`` values; there must be :data:`NOISE_WINDOW` differences.

        One new difference moves each order statistic by one rank at most.
        """
        settled = sorted(map(abs, islice(self.differences, NOISE_WINDOW)))
        return DIFFERENCE_TO_SIGMA * settled[((NOISE_WINDOW - 1) >> 1) - ahead]


# --------------------------------------------------------------------------- new levels

AROUND = 16
"""Samples before and after the jump whose medians are the two levels."""
LEAST_BEFORE = 4
"""Samples before the jump, at least: what has never been level cannot have left it."""
SOON = 8
"""Samples after the jump from which on it is a level."""
LATE = 40
"""Samples after a jump back to the start until which it has time to come down."""
EDGE = 3
"""Samples on either side of the jump that must belong to their level already: a climb takes longer."""
SLOPED = 0.2
"""Share of the rise that they may lack."""
AT_THE_START = 0.9
"""A new level above this part of the first one is back at the start."""
FAR_ABOVE = 5.0
"""A level of more than so many first ones is no other task but a run that blew up."""
FARTHEST = 1000.0
"""So many times the level before is no other task either, whatever the first one was."""
COMING_DOWN = 0.2
"""Share of the jump that is undone where the model learns what is new."""


class Shift(NamedTuple):
    """A jump to another level."""

    settled: bool
    """False while there are too few samples after it to say so."""
    values: list[float]
    """The samples after it."""


def shift_in(differences: Sequence[float], last: float, noise: float, *, best: float, first: float) -> Shift | None:
    """The jump that explains why a curve lies above its lowest level, or None if it has risen.

    A run that diverges climbs for some samples. Another data mix, longer sequences, a loss with another
    weight lift the loss between one sample and the next, because it is the loss that is another one; what
    comes after is a level, or falls, since the model goes on learning.

    One kind of jump is no new level: back to where the run began. Weights that were lost look like
    that, and so does a loss that has gone to what guessing costs. It is one only if it comes down again.

    :param differences: of the logarithms of neighbouring samples, oldest first.
    :param last: the newest sample.
    :param noise: standard deviation of a sample, in logarithms.
    :param best: the lowest level so far.
    :param first: the level that the curve began with.
    """
    if len(differences) <= LEAST_BEFORE:
        return None
    curve = [log(last) + y for y in accumulate(differences, initial=-sum(differences))]
    at = _steepest(curve)
    before, after = curve[max(0, at - AROUND) : at], curve[at:]
    low, high = median(before), median(after[:AROUND])
    rise = high - low
    slack = max(noise, SLOPED * rise)
    if rise < 2.0 * noise or fmean(before[-EDGE:]) - low > slack or high - fmean(after[:EDGE]) > slack:
        return None
    if high > log(FAR_ABOVE * first) or rise > log(FARTHEST):
        return None
    if low - log(best) > slack and not _level(curve[:at], noise):
        return None  # it was on its way already
    if len(after) < SOON:
        return Shift(False, [])
    half = min(AROUND, len(after) // 2)
    newest = median(after[-half:])
    drift = newest - median(after[:half])
    if high < log(AT_THE_START * first):
        if drift > max(2.0 * noise, COMING_DOWN * rise):
            return None  # and goes on rising
        return Shift(True, [exp(y) for y in after])
    if drift < -max(0.5 * noise, COMING_DOWN * rise):
        return Shift(True, [exp(y) for y in after])
    return Shift(False, []) if len(after) < LATE else None


def _level(curve: Sequence[float], noise: float) -> bool:
    """Whether both halves of a stretch lie equally high."""
    half = len(curve) // 2
    return half >= SOON and median(curve[half:]) - median(curve[:half]) < noise


def _steepest(curve: Sequence[float]) -> int:
    """Where a curve is best cut in two levels, the second one higher (the change point of least squares)."""
    n, total, so_far = len(curve), sum(curve), 0.0
    found, largest = LEAST_BEFORE, 0.0
    for at in range(1, n):
        so_far += curve[at - 1]
        gain = ((total - so_far) / (n - at) - so_far / at) * sqrt(at * (n - at))
        if at >= LEAST_BEFORE and gain > largest:
            found, largest = at, gain
    return found


# --------------------------------------------------------------------------- the condition


def compile_rebound(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "rebound")
    if breaches.direction <= 0 or breaches.high is None or breaches.high < 1.0:
        raise OptionError("the rebound score is a factor that starts at 1; compare it with `above: ...`, such as 1.05")
    smooth = sample_count(options, "smooth", 32)
    sigmas = float(options.get("sigmas", 0.0))
    fell, behind = _share(options, "fell"), _share(options, "behind")
    min_samples = max(2, min_samples_of(rule, 1_000_000, default=2))
    return CompiledCondition(
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
