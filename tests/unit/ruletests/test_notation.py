"""The series notation: what it means, and how it complains."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from healthcheck.ruletests.notation import NotationError, Values, expand, parse_series


def values(text: str, seed: str = "seed") -> Values:
    return expand(parse_series(text), seed)


def test_a_count_is_the_exact_number_of_samples() -> None:
    assert values("9.0 x5").values == [9.0] * 5
    assert values("9").values == [9.0]


def test_entries_follow_each_other_in_order() -> None:
    made = values("1 x2, nan, inf, -inf, _ x2, 3").values
    assert made[:2] == [1.0, 1.0]
    assert repr(made[2]) == "nan"
    assert made[3:] == [math.inf, -math.inf, None, None, 3.0]


def test_a_ramp_begins_and_ends_at_its_two_values() -> None:
    assert values("1..5 x5").values == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert values("3..2.5 x2").values == [3.0, 2.5]
    assert values("-1..1 x3").values == [-1.0, 0.0, 1.0]


def test_a_gap_is_time_and_not_a_sample() -> None:
    made = values("1 x2, gap 400s, 1, gap 1h30m")
    assert made.values == [1.0, 1.0, 1.0]
    assert made.gaps == {2: 400.0, 3: 5400.0}


def test_numbers_may_carry_units() -> None:
    assert values("16MiB, 30%, 300ms, 1GiB..2GiB x2").values == [2.0**24, 0.3, 0.3, 2.0**30, 2.0**31]


@pytest.mark.parametrize("text", ["1e-3x2", "1e-3 x2", "1e-3 x 2", "1e-3 * 2", ".001 x2", "+0.001 x2"])
def test_the_same_series_can_be_written_with_and_without_blanks(text: str) -> None:
    assert values(text).values == [0.001, 0.001]


def test_noise_is_the_same_every_time_and_differs_between_series() -> None:
    assert values("2.0~0.05 x50", "a/loss").values == values("2.0~0.05 x50", "a/loss").values
    assert values("2.0~0.05 x50", "a/loss").values != values("2.0~0.05 x50", "b/loss").values


def test_noise_is_pinned_so_that_thresholds_in_rule_tests_stay_true_on_every_python() -> None:
    assert values("0~1 x4", "pinned").values == pytest.approx(PINNED, rel=1e-12)


PINNED = [0.7413402860154531, 0.2178249849905952, -1.2892078133760771, -0.06788815939885023]


def test_noise_leaves_the_global_generator_alone() -> None:
    random.seed(1)
    before = random.getstate()
    values("0~1 x100")
    assert random.getstate() == before


def test_noise_is_normal_with_the_deviation_that_was_written() -> None:
    made = [v for v in values("5~0.5 x20000").values if v is not None]
    assert statistics.mean(made) == pytest.approx(5.0, abs=0.02)
    assert statistics.stdev(made) == pytest.approx(0.5, rel=0.03)
    beyond = sum(abs(v - 5.0) > 1.0 for v in made) / len(made)
    assert beyond == pytest.approx(0.0455, abs=0.006), "two standard deviations"


BAD = [
    ("2.0 x300, 9.O x5", "9.O x5", "is not a value", ""),
    ("1 x2, abc", "abc", "is not a value", "write for instance"),
    ("1, gap 5", "gap 5", "needs a duration", "write `gap 5s`"),
    ("1, gap", "gap", "needs a duration", "gap 400s"),
    ("1, 1..2", "1..2", "2 samples or more", "1..2 x100"),
    ("2, nan~1", "nan~1", "cannot have a ramp or noise", ""),
    ("2 x0", "0", "makes no sample", ""),
    ("2 5", "5", "cannot read", "comma"),
    ("2 y5", "y5", "cannot read", "x5"),
    ("2.0+1x5", "+1x5", "cannot read", "first..last x100"),
    ("1, missing x3", "missing x3", "is not a value", "`_`"),
    ("1 x2, 2~-1 x3", "-1", "cannot be negative", ""),
    ("5quux x3", "5quux", "unknown unit", ""),
    ("1 x9_999_999", "1 x9_999_999", "1,000,000 samples", ""),
]


@pytest.mark.parametrize(("text", "part", "message", "hint"), BAD, ids=[text for text, *_ in BAD])
def test_a_mistake_is_marked_and_answered(text: str, part: str, message: str, hint: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_series(text)
    error = caught.value
    assert message in str(error)
    assert hint in error.suggestion
    assert text[error.start : error.start + error.width] == part


@pytest.mark.parametrize("text", ["", "  ", "1,,2", "1,", ","])
def test_an_empty_entry_is_a_mistake_and_not_a_missing_sample(text: str) -> None:
    with pytest.raises(NotationError, match="empty"):
        parse_series(text)
