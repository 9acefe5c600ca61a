"""Messages: a closed set of placeholders, checked early, rendered without surprises."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.rulelang.rule import PLACEHOLDERS, Template, TemplateError, default_message

VALUES = {"value": 9.01234, "score": 14.26, "normal": 2.02, "step": 1502, "rule": "loss-spike", "series": "loss"}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("loss is {value} at step {step}", "loss is 9.012 at step 1,502"),
        ("{value:.4g} is {score:.1f} sigmas above {normal:.3f}", "9.012 is 14.3 sigmas above 2.020"),
        ("{{{rule}}} {series}", "{loss-spike} loss"),
        ("{epoch} {count}", "? ?"),
        ("{step:d} {step:,} {score:.0%}", "1502 1,502 1426%"),
        ("{series:.3f}", "loss"),
        ("{value:B}", "9 B"),
    ],
)
def test_placeholders_are_filled_in(text, rendered) -> None:
    assert Template(text)(VALUES) == rendered


@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (1e-7, "1e-07"), (16777216.0, "16,777,216")]
)
def test_numbers_read_well(value, shown) -> None:
    assert Template("{value}")({"value": value}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "{val}",
        "{}",
        "{0}",
        "{value!r}",
        "{value.__class__}",
        "{value[0]}",
        "{value:>999999999}",
        "{value:{step}}",
        "{value:.999f}",
        "lone { brace",
        "lone } brace",
        "x" * 501,
    ],
)
def test_anything_else_is_refused_when_the_file_is_read(text) -> None:
    with pytest.raises(TemplateError):
        Template(text)


@given(st.text(max_size=60), st.one_of(st.none(), st.floats(), st.integers(), st.text(), st.binary(), st.booleans()))
def test_rendering_never_raises_whatever_the_value(text, value) -> None:
    try:
        template = Template(text)
    except TemplateError:
        return
    assert isinstance(template(dict.fromkeys(PLACEHOLDERS, value)), str)


@given(
    st.sampled_from(["", "d", ".3f", "+.2e", ">9,.1f", "%", ".0%", "g", "10d", "B"]),
    st.one_of(st.floats(), st.integers()),
)
def test_every_accepted_format_takes_every_number(spec, value) -> None:
    assert Template("{value:" + spec + "}" if spec else "{value}")({"value": value})


def test_a_value_that_is_no_number_has_no_score_to_speak_of() -> None:
    message = default_message("{series} {value} is {score:.1f} sigmas from {normal}", judges_nonfinite=False)
    assert message({"series": "loss", "value": math.nan, "score": None}) == "loss is nan"
    assert message({"series": "loss", "value": 9.0, "score": 8.0, "normal": 2.0}) == "loss 9 is 8.0 sigmas from 2"
