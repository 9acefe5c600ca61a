"""Numbers with units, spans and holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.rulelang.comparators import COMPARATORS, Threshold
from healthcheck.rulelang.quantities import (
    QuantityError,
    parse_duration,
    parse_hold,
    parse_pace,
    parse_quantity,
    parse_span,
    parse_steps,
)
from healthcheck.rulelang.rule import Hold, Span


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (3, 3),
        ("30%", 0.3),
        ("16MiB", 2**24),
        ("300ms", 0.3),
        ("1.5 h", 5400),
        ("2GB", 2e9),
        ("-1e-3", -0.001),
        ("1_000", 1000),
    ],
)
def test_quantities_are_in_base_units(text, value) -> None:
    assert parse_quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["16mib", "high", "", "3 apples", True, float("nan"), float("inf"), "1e999", 10**400])
def test_what_is_no_finite_quantity_is_refused(text) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(text)


def test_spans_know_their_unit() -> None:
    assert parse_span(100) == Span(100, "steps")
    assert parse_span("20 samples") == Span(20, "samples")
    assert parse_span("2 evals") == Span(2, "samples")
    assert parse_span("1h30m") == Span(5400, "seconds")
    assert str(parse_span("100 steps")) == "100 steps"


def test_holds_count_samples() -> None:
    assert parse_hold(3) == Hold(3, 3)
    assert parse_hold("3 of 5") == Hold(3, 5)
    assert parse_hold("3 samples") == Hold(3, 3)
    assert parse_hold("30s") == Hold(seconds=30)


def test_a_pace_may_be_another_one_later() -> None:
    assert parse_pace(10) == (10, 0)
    assert parse_pace("10 steps") == (10, 0)
    assert parse_pace("10, then 50") == (10, 50)
    assert parse_pace("10 steps, then 100 steps") == (10, 100)


@pytest.mark.parametrize(
    "text", [0, "30s", "0, then 10", "10, then 0 samples", "10, then", "10, 50", "10, then 50, then 90", "then 5"]
)
def test_what_is_no_pace_is_refused(text) -> None:
    with pytest.raises(QuantityError):
        parse_pace(text)


def test_a_later_pace_that_leaves_the_steps_of_the_first_is_refused_with_one_that_does_not() -> None:
    with pytest.raises(QuantityError, match="such as 30"):
        parse_pace("10, then 25")


def test_a_duration_needs_its_unit() -> None:
    assert parse_duration("5m") == 300
    with pytest.raises(QuantityError, match="300s"):
        parse_duration(300)


def test_spans_of_steps_include_both_ends_and_may_be_open() -> None:
    assert parse_steps("12000..12500") == (12000, 12500)
    assert parse_steps("5..") == (5, None)
    assert parse_steps("..7") == (0, 7)
    assert parse_steps(9) == (9, 9)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans()))
def test_nothing_but_a_quantity_error_comes_out(value) -> None:
    for parse in (parse_quantity, parse_span, parse_hold, parse_duration, parse_steps):
        said = ""
        try:
            parse(value)
        except QuantityError as error:
            said = str(error)
        assert "\n" not in said


def test_comparators_say_what_they_ask() -> None:
    texts = {kind: Threshold(kind, [0, 5] if kind == "outside" else "90%").text for kind in COMPARATORS}
    assert texts["above"] == "above 90%"
    assert texts["at_least"] == "at least 90%"
    assert texts["outside"] == "outside 0 to 5"


@pytest.mark.parametrize(
    ("kind", "value", "true", "false"),
    [
        ("above", 5, 5.1, 5),
        ("below", 5, 4.9, 5),
        ("at_least", 5, 5, 4.9),
        ("at_most", 5, 5, 5.1),
        ("equals", 5, 5, 5.1),
        ("outside", [1, 5], 0.9, 5),
    ],
)
def test_comparators_at_their_limit(kind, value, true, false) -> None:
    test = Threshold(kind, value)
    assert test(true)
    assert not test(false)
