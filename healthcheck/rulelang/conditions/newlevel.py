"""A new level, told from a rise: for conditions that watch a curve turn round.

A run that diverges climbs for some samples. Another data mix, longer sequences, a loss with another
weight lift the loss between one sample and the next, because it is the loss that is another one; what
comes after is a level, or falls, since the model goes on learning.

One kind of jump is no new level: back to where the run began. Weights that were lost look like
that, and so does a loss that has gone to what guessing costs. It is one only if it comes down again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

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
