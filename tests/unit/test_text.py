"""Numbers as a person reads them."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.core import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2.3123, "2.31"),
        (2.0, "2"),
        (2.0014, "2.00"),
        (14_200.4, "14,200"),
        (88.13, "88.1"),
        (0.0123, "0.0123"),
        (3e-4, "0.0003"),
        (1.2e-7, "1.2e-07"),
        (1e9, "1e+09"),
        (-6.912, "-6.91"),
        (9.996, "10.0"),
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number_has_three_or_four_significant_digits(value: float, shown: str) -> None:
    assert text.number(value) == shown


def test_a_missing_number_is_a_dash_and_never_zero() -> None:
    assert text.number(None) == "-"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (21.4 * 2**30, "bytes", "21.4 GiB"),
        (0.25, "s", "250 ms"),
        (0.00266, "s", "2.66 ms"),
        (312, "s", "5 m 12 s"),
        (0.904, "fraction", "90.4 %"),
        (312, "1/s", "312/s"),
    ],
)
def test_numbers_carry_their_unit(value: float, unit: str, shown: str) -> None:
    assert text.number(value, unit) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.42, "0.4 s"),
        (9.97, "10 s"),
        (59.6, "1 m 0 s"),
        (312, "5 m 12 s"),
        (4200, "1 h 10 min"),
        (273_600, "3 d 4 h"),
        (3.15e8, "10 years"),
    ],
)
def test_durations_read_like_speech(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.04321, "2.043"), (1502, "1,502"), (12_000.0, "12,000"), (9000.0, "9000"), (1e15, "1e+15"), (math.nan, "nan")],
)
def test_messages_of_rules_have_four_digits_and_separators_where_something_is_counted(value: float, shown: str) -> None:
    assert text.in_message(value) == shown


def test_a_count_that_arrives_as_a_float_is_written_whole() -> None:
    assert text.in_message(131.0, whole=True) == "131"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(9.0, "9.000"), (139.61, "139.6"), (12_000_000.0, "1.2e+07"), (0.0, "0.000"), (None, "-"), (-math.inf, "-inf")],
)
def test_numbers_of_one_column_keep_their_zeros(value: float | None, shown: str) -> None:
    assert text.aligned(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(8.0, "8"), (0.3, "0.3"), (1e-7, "1e-07"), (16777216.0, "16777216")])
def test_a_threshold_reads_as_somebody_would_write_it(value: float, shown: str) -> None:
    assert text.as_written(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(65504.0, "6.55e4"), (3.0, "3"), (1e-8, "1e-8")])
def test_the_size_of_a_value_is_seen_at_a_glance(value: float, shown: str) -> None:
    assert text.power(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(512, "512 B"), (1536, "1.5 KiB"), (812 * 2**20, "812 MiB"), (3 * 2**50, "3072 TiB")]
)
def test_bytes_are_powers_of_1024(count: float, shown: str) -> None:
    assert text.size_text(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(9240.0, "2h 34m"), (312.0, "5m 12s"), (42.0, "42s"), (-1.0, "0s")])
def test_time_left_hardly_changes_its_width(seconds: float, shown: str) -> None:
    assert text.time_left(seconds) == shown


def test_counts_and_lists_stay_short() -> None:
    assert text.plural(1, "entry", "entries") == "1 entry"
    assert text.plural(1560, "step") == "1,560 steps"
    assert text.shorten(list("abcdef"), 3) == "a, b, c and 3 more"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("loss is nan", "loss is nan"),
        ("Verlust über 2", "Verlust über 2"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("left \u202eto right\u2066", r"left \u202eto right\u2066"),
        ("nothing\u200b to see\ufeff", r"nothing\u200b to see\ufeff"),
        ("next\x85line\u2028", r"next\x85line\u2028"),
        ("no such byte \udcff", r"no such byte \udcff"),
        ("\x00\x7f", r"\x00\x7f"),
        ("::error::mine", r":\x3aerror::mine"),
        ("   ::set-output name=x::y", r"   :\x3aset-output name=x::y"),
        ("a::b", "a::b"),
        ("see ##[group]x", r"see #\x23[group]x"),
        ("##vso[task.setvariable]x", r"#\x23vso[task.setvariable]x"),
        ("## a heading", "## a heading"),
    ],
)
def test_text_from_outside_shows_what_it_holds_and_does_nothing(raw: str, shown: str) -> None:
    assert text.visible(raw) == shown


def test_lines_stay_lines_and_each_of_them_is_safe() -> None:
    assert text.visible_lines("a\tb\n::error::c\n\x1b[2Jd") == "a\tb\n:\\x3aerror::c\n\\x1b[2Jd"


TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text())
def test_what_is_shown_can_always_be_printed_on_one_line(raw: str) -> None:
    shown = text.visible(raw)
    assert shown.splitlines() in ([], [shown])
    assert not any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in shown)
    assert not any(unicodedata.bidirectional(sign) in TURNING for sign in shown)
    assert text.visible(shown) == shown, "what is shown is shown the same when it is quoted"
