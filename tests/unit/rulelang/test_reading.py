"""The loader: YAML 1.2 scalars, places of everything, limits; and that nothing hostile gets further."""

from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from language import registry

from healthcheck.rulelang import loader, yamltree
from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.loader import load_file, load_text

KNOWN = registry()
UNBOUNDED = 60.0
"""Seconds of processor time that an answer never comes near; where work explodes with the text it takes far more."""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("off", "off"),
        ("no", "no"),
        ("on", "on"),
        ("010", 10),
        ("0o10", 8),
        ("0xff", 255),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("true", True),
        ("yes", "yes"),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("'1'", "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text, value) -> None:
    """As editors do: with the stock loader `1e-3` is text, `off` is false and `010` is eight."""
    got = load_text(f"a: {text}\n").data["a"]
    assert got == value
    assert type(got) is type(value)


def test_keys_are_always_text() -> None:
    assert load_text("on: 1\n1: 2\nnull: 3\n").data == {"on": 1, "1": 2, "null": 3}


def test_every_key_and_value_knows_its_place() -> None:
    document = load_text("a:\n  b: {c: 1, d: [x, y]}\n  e:\n    f: 2\n")
    places = {
        (("a",), False): (1, 1),
        (("a", "b", "c"), False): (2, 10),
        (("a", "b", "c"), True): (2, 7),
        (("a", "b", "d", 1), False): (2, 20),
        (("a", "e"), False): (3, 3),
        (("a", "e", "f"), False): (4, 8),
        (("a", "e", "missing"), False): (4, 5),
    }
    for (path, key), place in places.items():
        mark = document.mark(path, key=key)
        assert (mark.line, mark.column) == place, (path, key)


def test_an_alias_may_be_used_and_keeps_the_places_of_its_anchor() -> None:
    document = load_text("a: &x {b: 1}\nc: *x\n")
    assert document.data["c"] == {"b": 1}
    assert document.mark(("c", "b")).line == 1


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 5000 + "]" * 5000,
        "{a: " * 3000 + "1" + "}" * 3000,
        "- " * 5000 + "x",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "a: &a [*a]",
        "? {a: 1}\n: 2",
        "a: !!python/object:os.system x",
        "%YAML 9.9\n---\na: 1",
        "a: 1\n---\nb: 2",
        "\x00",
        "a: \x07",
        "a: 'x",
        "a: *",
        "a: &",
        "\ufeff",
        "&a &b c",
    ],
    ids=lambda t: repr(t[:20]),
)
def test_hostile_text_is_one_clean_problem(text) -> None:
    started = time.process_time()
    document = load_text(text)
    assert document.problems
    assert all(p.message and "\n" not in p.message for p in document.problems)
    assert time.process_time() - started < UNBOUNDED


def test_a_file_over_the_size_limit_is_not_read(tmp_path) -> None:
    (tmp_path / "big.yaml").write_text("a: " + "x" * loader.MAX_BYTES)
    (problem,) = load_file(tmp_path / "big.yaml").problems
    assert problem.slug == "too-large"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda n: "version: 1\nrules:\n" + "  a: {metric: loss}\n" * (n // 20),
        lambda n: "a: [" + "1," * (n // 2 - 10) + "1]",
        lambda n: "a: '" + "x" * (n - 10) + "'",
        lambda n: "a: " + "9" * (n - 10),
        lambda n: "x" * (n - 10),
        lambda n: "- a\n" * (n // 4 - 1),
        lambda n: "version: 1\nrules:\n" + "".join(f"  r{i}: off\n" for i in range(n // 12)),
        lambda n: (
            "version: 1\nrules:\n" + "".join(f"  r{i}: {{metric: m{i}, when: {{above: 1}}}}\n" for i in range(n // 50))
        ),
        lambda n: "version: 1\n" + "".join(f"k{i}: 1\n" for i in range(n // 12)),
        lambda n: "? " * (n // 2 - 1),
        lambda n: (
            "version: 1\nrules:\n" + "".join(f"  r{i}: {{metrc: loss, whn: {{abov: 1}}}}\n" for i in range(n // 50))
        ),
    ],
)
def test_a_file_of_a_mebibyte_is_answered_in_bounded_time(make) -> None:
    started = time.process_time()
    load_all([make(loader.MAX_BYTES) + "\n"], registry=KNOWN)
    assert time.process_time() - started < UNBOUNDED


def test_without_libyaml_the_answers_are_the_same(monkeypatch) -> None:
    texts = ["a: {b: 1e-3, c: 'x', d: off}\n", "a: &x [1]\nb: *x\n", "a: [*x]\n", "a: {b: [1, 2}\n", "a: 1\na: 2\n"]
    monkeypatch.setattr(loader, "_read", {})
    fast = [load_text(t) for t in texts]
    monkeypatch.setattr(loader, "_read", {})
    monkeypatch.setattr(yamltree, "CParser", None)
    slow = [load_text(t) for t in texts]
    assert [(d.data, d.root, d.problems) for d in slow] == [(d.data, d.root, d.problems) for d in fast]


def test_an_anchor_may_be_set_again_and_each_alias_has_the_latest() -> None:
    document = load_text("a: &x 1\nb: *x\nc: &x [2]\nd: *x\n")
    assert document.problems == []
    assert document.data == {"a": 1, "b": 1, "c": [2], "d": [2]}


def test_half_of_a_surrogate_pair_is_a_clean_problem() -> None:
    (problem,) = load_text("a: \ud800\n").problems
    assert (problem.slug, problem.line, problem.column) == ("syntax", 1, 4)


# --------------------------------------------------------------------------- fuzzing

WORDS = st.sampled_from(
    [
        "version",
        "rules",
        "metric",
        "when",
        "above",
        "for",
        "then",
        "extends",
        "profiles",
        "metrics",
        "mute",
        "settings",
        "external",
        "defaults",
        "loss",
        "robust_z",
        "window",
        "all",
        "any",
        "off",
        "nonfinite",
        "message",
        "explains",
        "only_if",
        "recover",
        "stop",
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), WORDS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=8)), inner, max_size=5)
    ),
    max_leaves=25,
)
CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(st.dictionaries(WORDS, TREES, max_size=6))
@CALM
def test_any_tree_gives_rules_or_clean_problems(tree) -> None:
    loaded = load_all([{"version": 1, **tree}], registry=KNOWN)
    assert all(p.message and p.slug for p in loaded.problems)


@given(st.dictionaries(st.sampled_from(["a", "b"]), st.dictionaries(WORDS, TREES, max_size=6), max_size=2))
@CALM
def test_any_rule_gives_rules_or_clean_problems(rules) -> None:
    loaded = load_all(
        [{"version": 1, "rules": rules, "profiles": {"p": {"rules": rules}}}], registry=KNOWN, profile="p"
    )
    for rule in loaded.ruleset.causes:
        rule.condition.start()


@given(st.text(max_size=200))
@CALM
def test_any_text_gives_a_document_or_clean_problems(text) -> None:
    document = load_text(text)
    assert document.problems or document.root is not None
    for problem in document.problems:
        assert problem.line >= 0
        assert problem.column >= 0


@given(st.binary(max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gives_a_document_or_clean_problems(tmp_path, raw) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(raw)
    document = load_file(path)
    assert document.problems or document.root is not None


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="there is only one parser here")
def test_a_syntax_error_that_only_the_fast_parser_reaches_in_time_is_still_named(monkeypatch) -> None:
    """At the end of a long file the Python parser, whose words we use, would run out of time."""
    late = []

    class Late(yamltree._PyYAML):
        def __init__(self, text, document) -> None:
            super().__init__(text, document)
            self.deadline = 0.0
            late.append(self)

    monkeypatch.setattr(yamltree, "LOOK_AT_CLOCK", 1)
    monkeypatch.setattr(yamltree, "_PyYAML", Late)
    (problem,) = load_text("a: [1, 2, 3]\nb: [1, 2}\n").problems
    assert len(late) == 1
    assert (problem.slug, problem.line) == ("syntax", 2)
