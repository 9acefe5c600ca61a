"""A jump to a new level, told from a rise."""

from __future__ import annotations

import random
from itertools import pairwise
from math import log

from healthcheck.rulelang.conditions.rebound import Shift, shift_in

NOISE = 0.03


def shift(*stretches: tuple[int, float, float], best: float = 0.5, first: float = 4.0) -> Shift | None:
    """Of a curve made of stretches: samples, from, to."""
    draw = random.Random(3)
    curve = [(a + (b - a) * i / max(1, n - 1)) * (1 + draw.gauss(0, NOISE)) for n, a, b in stretches for i in range(n)]
    differences = [log(after / before) for before, after in pairwise(curve)]
    return shift_in(differences, curve[-1], NOISE, best=best, first=first)


def settled(found: Shift | None) -> bool:
    return found is not None and found.settled


def test_a_jump_that_stays_or_comes_down_is_a_new_level_after_eight_samples() -> None:
    assert shift((30, 0.5, 0.5), (4, 1.0, 1.0)) == Shift(False, [])
    found = shift((30, 0.5, 0.5), (12, 1.0, 1.0))
    assert found is not None
    assert found.settled
    assert len(found.values) == 12
    assert settled(shift((30, 0.6, 0.5), (20, 1.2, 0.9)))


def test_a_climb_is_none_and_nor_is_a_jump_that_goes_on_rising() -> None:
    assert shift((30, 0.5, 0.5), (12, 0.5, 1.0), (12, 1.0, 1.0)) is None
    assert shift((30, 0.5, 0.5), (24, 1.0, 2.0)) is None


def test_what_had_begun_to_rise_before_is_none() -> None:
    assert shift((30, 0.6, 0.9), (12, 1.5, 1.5)) is None


def test_a_second_jump_counts_from_a_level_that_stood() -> None:
    assert settled(shift((40, 0.9, 0.9), (12, 1.5, 1.5)))


def test_back_at_the_start_it_must_come_down() -> None:
    assert shift((20, 0.5, 0.5), (20, 4.0, 4.0)) == Shift(False, [])
    assert shift((20, 0.5, 0.5), (44, 4.0, 4.0)) is None
    assert settled(shift((20, 0.5, 0.5), (30, 4.0, 1.0)))


def test_far_above_all_that_was_is_none() -> None:
    assert shift((30, 0.5, 0.5), (12, 25.0, 25.0)) is None
    assert shift((30, 0.001, 0.001), (12, 1.5, 1.5), best=0.001) is None


def test_too_few_samples_say_nothing() -> None:
    assert shift((2, 0.5, 0.5), (2, 1.0, 1.0)) is None
