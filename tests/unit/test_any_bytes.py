"""No bytes make ``check``, ``replay``, rule tests or accepted files end in a traceback, hang, or write a raw control character.

A thousand mutated inputs here; ``benchmarks/fuzz.py`` makes as many as one likes, from the same seeds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck_fuzz", ROOT / "benchmarks" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["healthcheck_fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize(("kind", "count"), [("rules", 100), ("accepted", 30), ("ruletests", 30), ("records", 40)])
def test_mutated_files_are_answered_in_words(
    kind: str, count: int, part: int, fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {seed: fuzz.failure(kind, seed, tmp_path) for seed in range(part * count, (part + 1) * count)}
    assert {seed: text for seed, text in wrong.items() if text} == {}, f"python benchmarks/fuzz.py --only {kind}:SEED"


KEYS = st.sampled_from(
    ["version", "rules", "extends", "metrics", "external", "profiles", "settings", "defaults", "metric", "when", "above", "all", "any",
     "robust_z", "window", "for", "recover", "then", "checkpoint", "path", "only_if", "every", "message", "severity", "loss-spike", "a", "renamed"]
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300),
    st.floats(),
    st.text(max_size=30),
    st.sampled_from(
        [
            "loss",
            "grad_norm[*]",
            "3 of 5",
            "10 steps",
            "off",
            "{value:.400f}",
            "healthcheck:recommended",
            "mean(loss, 3)",
            "1e400",
        ]
    ),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=20,
)
DOCUMENTS = st.fixed_dictionaries(
    {"version": st.just(1)}, optional=dict.fromkeys(("rules", "extends", "metrics", "profiles", "settings"), TREES)
)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["step", "loss", "epoch", "lr", "time", "val_loss", "m", "series", "at", "t"]),
        TREES,
        max_size=5,
    ),
    max_size=8,
)


def check(fuzz: ModuleType, run: Callable[[], str]) -> None:
    assert not fuzz.RAW.search(run())


@settings(max_examples=100)
@given(document=DOCUMENTS)
def test_rule_files_of_any_shape_are_answered_in_words(document: Any, fuzz: ModuleType, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=False))
    check(fuzz, lambda: fuzz.said_of_rules(path))


@settings(max_examples=40)
@given(entries=st.one_of(TREES, st.fixed_dictionaries({"version": st.just(1), "accepted": TREES})))
def test_accepted_files_of_any_shape_are_answered_in_words(
    entries: Any, fuzz: ModuleType, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("accepted") / "healthcheck-accepted.yaml"
    path.write_text(yaml.safe_dump(entries, allow_unicode=False))
    check(fuzz, lambda: fuzz.said_of_accepted(path))


@settings(max_examples=40)
@given(rows=ROWS, name=st.sampled_from(["log.jsonl", "samples.jsonl", "log.json"]))
def test_records_of_any_shape_are_answered_in_words(
    rows: Any, name: str, fuzz: ModuleType, tmp_path_factory: Any
) -> None:
    import json

    path = tmp_path_factory.mktemp("record") / name
    path.write_text(json.dumps(rows) if name == "log.json" else "".join(json.dumps(row) + "\n" for row in rows))
    check(fuzz, lambda: fuzz.said_by("replay", str(path), "--rules", "healthcheck:ci-smoke"))


@settings(max_examples=40)
@given(content=st.binary(max_size=400))
def test_any_bytes_at_all_are_answered_in_words(content: bytes, fuzz: ModuleType, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "any.yaml"
    path.write_bytes(content)
    check(fuzz, lambda: fuzz.said_of_rules(path) + fuzz.said_of_rule_test(path))


@pytest.mark.parametrize(
    "text",
    [
        'version: 1\nrules: {"\\UFFFFFFFF": off}\n',
        f"version: 1\nextends: ['{'a' * 3000}']\n",
        "version: 1\nrules:\n" + "".join(f"  r{i}: {{metric: nosuch{i}, when: {{above: 1}}}}\n" for i in range(10_000)),
        f"version: 1\nexternal: [{', '.join(f'm{i}' for i in range(50_000))}]\nrules: {{a: {{metric: mm, when: {{above: 1}}}}}}\n",
        f"version: 1\nrules: {{a: {{metric: loss, when: {{above: {'9' * 400}}}}}}}\n",
    ],
    ids=["escape", "long-name", "10,000-names", "50,000-metrics", "400-digits"],
)
def test_hostile_sizes_are_answered_in_time(text: str, fuzz: ModuleType, tmp_path: Path) -> None:
    import time

    path = tmp_path / "rules.yaml"
    path.write_text(text)
    fuzz.host()
    began = time.process_time()
    assert "error[" in fuzz.said_of_rules(path)
    assert time.process_time() - began < 2.0


def test_a_number_of_400_digits_in_a_record_is_infinite(fuzz: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"step": {i}, "loss": {"9" * 400}}}\n' for i in range(3)))
    assert "loss is inf" in fuzz.said_by("replay", str(path))


def test_a_name_that_is_too_long_and_a_folder_that_is_gone_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from healthcheck.cli import main

    assert main(["check", "a" * 5000]) == 4
    assert capsys.readouterr().err.startswith("healthcheck: File name too long")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check"]) == 4
    assert capsys.readouterr().err.count("\n") == 1
