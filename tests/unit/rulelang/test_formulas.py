"""The arithmetic of the ``metrics:`` block."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthcheck.rulelang.formulas import FormulaError, parse_formula
from healthcheck.rulelang.rule import Origin

HERE = Origin("test")


def compute(text: str, **values: float) -> float | None:
    return parse_formula("f", text, HERE).compute(values.get)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b * c", 2 + 3 * 4),
        ("(a + b) * c", 20),
        ("a - b - c", 2 - 3 - 4),
        ("c / a / a", 1),
        ("-a + -(b)", -5),
        ("a - -b", 5),
        ("min(a, b, c) + max(a, b) * abs(-c)", 2 + 3 * 4),
        ("sqrt(c) + log(1) + 0*a", 2),
        ("1e-3*a + .5*b + 2.*c", 0.002 + 1.5 + 8),
    ],
)
def test_operators_bind_as_in_school(text, value) -> None:
    assert compute(text, a=2.0, b=3.0, c=4.0) == pytest.approx(value)


def test_dotted_names_are_one_metric() -> None:
    formula = parse_formula("f", "time.data / time.step", HERE)
    assert formula.triggers == ("time.data", "time.step")


@pytest.mark.parametrize("name", ["lambda", "time.is", "eval.top.5", "None", "x", "xx.x", "a.1e3"])
def test_metrics_may_have_names_that_python_would_not_take(name) -> None:
    formula = parse_formula("f", f" 2 * {name} -\n{name} / x", HERE)
    assert formula.triggers == tuple(dict.fromkeys((name, "x")))
    assert formula.compute({"x": 4.0, name: 4.0}.get) == 7.0
    assert {use.column for use in formula.uses if use.name == name} >= {5}


@pytest.mark.parametrize(("text", "value"), [("a * 007", 14.0), ("a + 1.", 3.0), ("a*1E2", 200.0), ("-a*-2", 4.0)])
def test_numbers_are_decimal_whatever_python_would_read(text, value) -> None:
    assert compute(text, a=2.0) == value


@pytest.mark.parametrize(
    "text",
    [
        "a if a else a",
        "a or a",
        "not a",
        "lambda: a",
        "a := 2",
        "[a]",
        "{a}",
        "f'{a}'",
        "'a'",
        "a < a < a",
        "a ** 2",
        "a // 2",
        "a % 2",
        "a @ a",
        "~a",
        "a, a",
        "(a,)",
        "min(a, a,)",
        "min(*a)",
        "max(a=1, b=2)",
        "a.b()",
        "a()(a)",
        "(a)(a)",
        "a # b",
        "a;a",
        "a\\\n",
        "await a",
        "1j * a",
        "0x1 * a",
        "1_0 * a",
        "a é",
        "()",
        "a[0]",
        "a . b",
    ],
)
def test_nothing_else_of_python_is_part_of_the_language(text) -> None:
    with pytest.raises(FormulaError):
        parse_formula("f", text, HERE)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("a + last(a, 3)", "last() needs the metric alone: last(a)", 4),
        ("a + mean(a)", "mean() needs the metric and a number of samples: mean(a, 100)", 4),
        ("a + ewma(2, 3)", "looks up a plain metric", 9),
        ("a + ewma(a, 2.5)", "counts samples", 12),
        ("min(a)", "min() takes 2 to 16 arguments, found 1", 0),
        ("a + (b a)", "this bracket is never closed", 4),
        ("a + * b", 'expected a number or a metric, found "*"', 4),
    ],
)
def test_a_mistake_is_named(text, message, column) -> None:
    with pytest.raises(FormulaError) as raised:
        parse_formula("f", text, HERE)
    assert message in str(raised.value)
    assert raised.value.column == column


def test_a_value_exists_only_when_every_bare_input_has_one() -> None:
    formula = parse_formula("gap", "(eval.loss - ewma(loss, 200)) / ewma(loss, 200)", HERE)
    assert formula.triggers == ("eval.loss",)
    assert formula.inputs == ("eval.loss", "loss")
    assert formula.compute({"eval.loss": 3.0}.get) is None, "the look-up has seen nothing yet"
    formula.feed("loss", 2.0)
    assert formula.compute({"eval.loss": 3.0}.get) == 0.5
    assert formula.compute({}.get) is None


@pytest.mark.parametrize(
    ("text", "value"), [("a / b", 0.0), ("log(b)", -1.0), ("sqrt(b)", -1.0), ("a * 1e308 * b", 1e308)]
)
def test_finite_inputs_with_an_undefined_result_give_no_sample(text, value) -> None:
    assert compute(text, a=1e10, b=value) is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ["a + b", "a / b", "min(a, b)", "0 * b + a", "a + last(b) * 0"])
def test_a_non_finite_input_is_never_hidden(text, broken) -> None:
    formula = parse_formula("f", text, HERE)
    formula.feed("b", broken)
    result = formula.compute({"a": 1.0, "b": broken}.get)
    assert result is not None
    assert math.isnan(result)


def test_a_nan_never_enters_a_mean() -> None:
    formula = parse_formula("f", "a - mean(b, 3) - ewma(b, 3)", HERE)
    for value in (1.0, math.nan, 1.0):
        formula.feed("b", value)
    assert formula.compute({"a": 2.0}.get) == 0.0


def test_look_ups_go_on_after_a_resume() -> None:
    text = "a + ewma(b, 5) + mean(b, 4) + last(b)"
    first, second = parse_formula("f", text, HERE), parse_formula("f", text, HERE)
    for i in range(10):
        first.feed("b", i * 0.3)
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    for value in (2.0, -1.0):
        first.feed("b", value)
        second.feed("b", value)
        assert first.compute({"a": 1.0}.get) == second.compute({"a": 1.0}.get)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("a +", 2),
        ("a + * b", 4),
        ("(a", 0),
        ("a)", 1),
        ("a b", 2),
        ("a ** b", 2),
        ("a > b", 2),
        ("emwa(a, 3) + b", 0),
        ("a + ewma(a + b, 3)", 9),
        ("a + ewma(a, b)", 12),
        ("a + mean(a, 0)", 12),
        ("a + 1e999", 4),
        ("a['x']", 1),
        ("__import__('os')", 11),
        ("a.b.c()", 0),
        ("", 0),
        ("a + " + "(" * 40 + "b" + ")" * 40, 36),
    ],
)
def test_mistakes_are_placed_at_their_column(text, column) -> None:
    with pytest.raises(FormulaError) as raised:
        parse_formula("f", text, HERE)
    assert raised.value.column == column


def test_length_is_bounded() -> None:
    with pytest.raises(FormulaError, match="at most 200"):
        parse_formula("f", "a + " * 100 + "a", HERE)


@given(st.text(max_size=220))
def test_no_text_does_anything_but_parse_or_be_refused(text) -> None:
    try:
        formula = parse_formula("f", text, HERE)
    except FormulaError as error:
        column = error.column
    else:
        column = 0
        for name in formula.inputs:
            formula.feed(name, 1.5)
        formula.compute(lambda name: 0.0)
    assert 0 <= column <= max(len(text), 1)


@given(
    st.lists(
        st.sampled_from(["a", "b.c", "1", "2.5", "+", "-", "*", "/", "(", ")", ",", "min", "ewma", "log", "last"]),
        max_size=30,
    )
)
def test_no_sequence_of_tokens_raises_anything_else(tokens) -> None:
    try:
        formula = parse_formula("f", " ".join(tokens), HERE)
    except FormulaError:
        return
    formula.compute(lambda name: 3.0)
