"""Numbers as a person reads them."""

from __future__ import annotations

import io
import math

import pytest

from healthcheck.reports import text


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


def test_a_number_inside_another_number_is_not_mentioned() -> None:
    """Else "normal 2" would be left out of "loss is 20" as if it had been said."""
    assert not text.mentions("loss is 20", "2")
    assert not text.mentions("loss is 2.31", "2")
    assert text.mentions("loss is 2.", "2")
    assert text.mentions("loss is 2, usually 1", "2")


def test_text_outside_ascii_is_spelled_out() -> None:
    assert text.ascii_only("Größe") == "Gr\\xf6\\xdfe"


def test_the_exit_code_stands_at_the_same_column() -> None:
    assert text.with_exit("healthcheck: OK", 0).index("exit 0") == text.with_exit("healthcheck: FAILED", 1).index(
        "exit 1"
    )


def test_a_long_closing_line_keeps_its_exit_code() -> None:
    assert text.with_exit("x" * 120, 1).endswith("x  exit 1")


def test_a_table_is_cut_at_the_width_of_a_terminal_and_never_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "50")
    assert text.no_wider_than(["x" * 60, "short"], Terminal()) == ["x" * 47 + "...", "short"]
    assert text.no_wider_than(["x" * 60], io.StringIO()) == ["x" * 60]
