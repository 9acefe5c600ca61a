"""Mistakes in rule-test files: each with its place and a way out, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthcheck.core.errors import RuleFileError
from healthcheck.ruletests.loading import SCHEMA, SYNONYMS, load_tests
from tests.unit.ruletests.conftest import Book

GOOD = '    series: {loss: "1 x3"}\n    expect: none\n'


def complaints(book: Book, tests: str, **options: str) -> list[str]:
    with pytest.raises(RuleFileError) as caught:
        book(tests, **options)
    return [str(problem) for problem in caught.value.problems]


MISTAKES = {
    "a key that does not exist": (
        '  - {name: a, serie: {loss: "1"}, series: {loss: "1"}, expect: none}\n',
        'unknown key "serie" (did you mean "series"?)',
    ),
    "a word of another tool": (
        '  - {name: a, input_series: {loss: "1"}, expect: none}\n',
        "here it is called `series`",
    ),
    "no name": ("  - \n" + GOOD, "needs a `name`"),
    "no series": ("  - {name: a, expect: none}\n", "needs `series`"),
    "no expectation": ('  - {name: a, series: {loss: "1"}}\n', "needs `expect`"),
    "two tests of one name": ("  - name: a\n" + GOOD + "  - name: a\n" + GOOD, "is the name of the test at line 4 too"),
    "a rule that does not exist": (
        '  - {name: a, series: {loss: "1"}, expect: [{rule: los-high}]}\n',
        '"los-high" is not a rule of these files (did you mean "loss-high"?)',
    ),
    "an action that does not exist": (
        '  - {name: a, series: {loss: "1"}, expect: [{rule: loss-high, then: [wran]}]}\n',
        '"wran" is not an action (did you mean "warn"?)',
    ),
    "a series that nobody knows": ('  - {name: a, series: {los: "1"}, expect: none}\n', '"los" (did you mean "loss"?)'),
    "a series that no rule watches": (
        '  - {name: a, series: {throughput: "1"}, expect: none}\n',
        "no rule watches a series of this test",
    ),
    "a rule without its series": (
        '  - {name: a, only: [loss-high], series: {kl: "1"}, expect: none}\n',
        "no series of this test reaches loss-high, which watches loss",
    ),
    "a rule that is not used": (
        '  - {name: a, only: [loss-high], series: {loss: "1"}, expect: [loss-long]}\n',
        '"loss-long" is not used in this test (only, off)',
    ),
    "a step that is none": (
        '  - {name: a, series: {loss: "1"}, expect: [{rule: loss-high, fires: soon}]}\n',
        "`fires` is a step or a list of steps",
    ),
    "step zero": (
        '  - {name: a, series: {loss: "1"}, expect: [{rule: loss-high, fires: 0}]}\n',
        "counted from 1; found 0",
    ),
    "a severity that is none": (
        '  - {name: a, series: {loss: "1"}, expect: [{rule: loss-high, severity: eror}]}\n',
        'not one of info, warning, error (did you mean "error"?)',
    ),
    "a time without unit": ("  - name: a\n    step_time: 5\n" + GOOD, "a duration needs a unit"),
    "a rank that is none": (
        '  - {name: a, ranks: {zero: {loss: "1"}}, expect: none}\n',
        '"zero": a rank is a number, counted from 0',
    ),
    "a rank that does not play": (
        '  - {name: a, series: {loss: "9"}, expect: [{rule: loss-high, rank: 3}]}\n',
        "this test has no rank 3",
    ),
    "an xfail without reason": ("  - name: a\n    xfail: true\n" + GOOD, "`xfail` needs a reason"),
    "a record that is not there": (
        "  - {name: a, series: run9, expect: none}\n",
        '"run9" is not a record beside this file',
    ),
    "a series that cannot be read": (
        '  - {name: a, series: {loss: "1 x3, 9.O"}, expect: none}\n',
        '"9.O" is not a value',
    ),
    "a profile that does not exist": ("  - name: a\n    profile: strickt\n" + GOOD, 'there is no profile "strickt"'),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_each_mistake_has_one_answer(book: Book, what: str) -> None:
    tests, answer = MISTAKES[what]
    found = complaints(book, tests)
    assert len(found) == 1, found
    assert answer in found[0]


def test_the_place_of_a_bad_entry_is_exact(book: Book) -> None:
    tests = '  - name: a\n    series: {loss: "1 x3, 9.O"}\n    expect: none\n'
    assert complaints(book, tests)[0].startswith("team.hctest.yaml:5:27: error[series]:")
    with pytest.raises(RuleFileError) as caught:
        book(tests)
    assert caught.value.problems[0].width == 3


def test_all_mistakes_come_at_once_those_beside_the_rules_included(book: Book) -> None:
    tests = '  - {name: a, series: {los: "1 x3, 9.O"}, expect: [{rule: x, fire: 3}]}\n  - {name: b, only: [y], series: {loss: "1"}}\n'
    found = complaints(book, tests)
    assert [line.split("error[")[1].split("]")[0] for line in found] == [
        "unknown-metric",
        "series",
        "unknown-rule",
        "unknown-key",
        "missing-key",
        "unknown-rule",
    ]


def test_a_misspelt_key_is_one_mistake_and_not_a_missing_key_as_well(book: Book) -> None:
    tests = '  - {nam: a, seris: {loss: "1"}, expct: none}\n  - {name: b, series: {loss: "9"}, expect: [{rul: loss-high}]}\n'
    found = complaints(book, tests)
    assert [line.split('did you mean "')[1].split('"')[0] for line in found] == ["name", "series", "expect", "rule"]


def test_mistakes_of_the_rule_file_come_with_those_of_the_tests(book: Book) -> None:
    found = complaints(
        book, "  - {name: a, expect: none}\n", rules="version: 1\nrules:\n  r: {metric: loss, when: {abov: 5}}\n"
    )
    assert len(found) == 2
    assert "needs `series`" in found[0]
    assert "team.yaml:3" in found[1]


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        ("step_tim: 5s\n", 'did you mean "step_time"?'),
        ("step_time: fast\n", "is not a duration"),
        ("profile: 3\n", "profile name"),
    ],
)
def test_mistakes_at_the_top_are_found(book: Book, head: str, answer: str) -> None:
    assert any(answer in line for line in complaints(book, "  - name: a\n" + GOOD, head=head))


def test_the_schema_is_a_valid_one_and_every_synonym_has_a_key() -> None:
    from jsonschema import Draft7Validator

    Draft7Validator.check_schema(SCHEMA)
    test = SCHEMA["properties"]["tests"]["items"]
    keys = {*SCHEMA["properties"], *test["properties"], *test["properties"]["expect"]["items"]["then"]["properties"]}
    assert set(SYNONYMS.values()) <= keys
    assert not set(SYNONYMS) & keys


KEYS = st.sampled_from(
    [
        "healthcheck_tests",
        "rules",
        "tests",
        "name",
        "series",
        "ranks",
        "expect",
        "only",
        "off",
        "set",
        "warmup",
        "profile",
        "step_time",
        "resume_at",
        "xfail",
        "rule",
        "fires",
        "clears",
        "then",
        "count",
        "file",
        "loss",
        "0",
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), KEYS, st.just("1 x3"))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=20,
)


@given(
    st.fixed_dictionaries(
        {"healthcheck_tests": st.just(1), "tests": st.lists(st.dictionaries(KEYS, TREES, max_size=6))}
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_file_gives_tests_or_clean_problems(tmp_path: Path, tree: Any) -> None:
    path = tmp_path / "any.hctest.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")
    file, problems = load_tests(path)
    assert problems, "it names no rules"
    assert all(problem.message and problem.slug for problem in problems)
    assert all(test.name for test in file.tests)
