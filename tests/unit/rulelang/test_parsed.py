"""Texts that were read before are kept on disk: never out of date, and never in the way."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from healthcheck.assembly import BUILTINS, plugin_host
from healthcheck.extend.host import PluginHost
from healthcheck.rulelang import loader, parsed
from healthcheck.rulelang.loader import load_file, load_text
from healthcheck.rulelang.schema import RuleFormat
from healthcheck.rulelang.sources import shipped_packs
from healthcheck.rulelang.validation import Validator

REGISTRY = plugin_host().registry
TEXT = 'version: 1\nrules:\n  spike: {metric: loss, when: {above: 5}, message: "{value}"}\n'


@pytest.fixture(autouse=True)
def another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet, and what is kept goes to a folder of the test's own."""
    monkeypatch.setenv("HEALTHCHECK_CACHE", str(tmp_path / "kept"))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_read", {})
    monkeypatch.setattr(parsed, "known", {})


def read(text: str = TEXT) -> tuple[object, object, list[str]]:
    document = load_text(text)
    problems = [problem.message for problem in [*document.problems, *Validator(RuleFormat(REGISTRY)).check(document)]]
    return document.data, document.root, problems


def test_a_text_that_was_read_before_needs_neither_yaml_nor_a_validator(monkeypatch: pytest.MonkeyPatch) -> None:
    first = read()
    assert first[2] == []
    forget(monkeypatch)
    monkeypatch.setattr("healthcheck.rulelang.yamltree.compose", None)
    monkeypatch.setattr(Validator, "_passes", None)
    assert read() == first


def test_a_text_that_has_changed_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    read()
    forget(monkeypatch)
    assert "above: 7" in (changed := TEXT.replace("above: 5", "above: 7"))
    assert read(changed)[0] == {**load_text(changed).data}
    assert read(TEXT.replace("above", "abvoe"))[2] != []


def test_a_text_with_a_mistake_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = TEXT.replace("metric", "metrik")
    first = read(wrong)[2]
    forget(monkeypatch)
    assert read(wrong)[2] == first != []


def test_what_another_version_has_kept_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    read()
    forget(monkeypatch)
    monkeypatch.setattr(parsed, "_stamp", lambda: "another")
    assert parsed.find(TEXT) is None


def test_another_schema_looks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that refuses more: what the schema without it has passed says nothing."""
    read()
    forget(monkeypatch)
    stricter = RuleFormat(REGISTRY)
    stricter.schema = {**stricter.schema, "required": ["version", "settings"]}
    assert Validator(stricter).check(load_text(TEXT)) != []


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"x" * 500])
def test_a_damaged_file_is_as_good_as_none(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read()
    (kept,) = Path(os.environ["HEALTHCHECK_CACHE"]).iterdir()
    for damaged in (content, kept.read_bytes()[:-1], kept.read_bytes()[:100] + b"?" + kept.read_bytes()[101:]):
        kept.write_bytes(damaged)
        forget(monkeypatch)
        assert parsed.find(TEXT) is None
        assert read() == first


def test_where_nothing_can_be_written_everything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file"), "/proc/nowhere", "off"):
        monkeypatch.setenv("HEALTHCHECK_CACHE", folder)
        forget(monkeypatch)
        assert read()[2] == []
    assert not (tmp_path / "kept").exists()


def test_old_texts_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "MOST", 3)
    for number in range(5):
        read(TEXT + f"# {number}\n")
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_what_one_reader_changes_does_not_show_in_what_the_next_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    document = load_text(TEXT)
    Validator(RuleFormat(REGISTRY)).check(document)
    document.data["rules"].clear()
    forget(monkeypatch)
    assert "spike" in load_text(TEXT).data["rules"]


BUILT_IN = PluginHost()
BUILT_IN.load_builtins(importlib.import_module(name) for name in BUILTINS)


@pytest.mark.parametrize("path", list(shipped_packs()), ids=lambda path: path.stem)
def test_a_pack_as_it_is_shipped_needs_no_validator(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Validator, "_passes", None)
    assert Validator(RuleFormat(BUILT_IN.registry)).check(load_file(path)) == []


def test_a_pack_that_was_edited_is_looked_at_as_any_other_file() -> None:
    (path,) = [path for path in shipped_packs() if path.stem == "core"]
    edited = load_text(path.read_text(encoding="utf-8").replace("metric: loss", "metrik: loss", 1))
    assert "metrik" in str(Validator(RuleFormat(BUILT_IN.registry)).check(edited))


def test_a_plugin_with_a_condition_of_its_own_has_packs_looked_at() -> None:
    """It may refuse what the schema without it lets pass."""
    stricter = RuleFormat(BUILT_IN.registry)
    stricter.schema = {**stricter.schema, "required": ["version", "settings"]}
    (path,) = [path for path in shipped_packs() if path.stem == "core"]
    assert Validator(stricter).check(load_file(path)) != []


def test_without_the_list_of_what_is_shipped_packs_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsed, "SHIPPED", "gone.txt")
    parsed._seals.cache_clear()
    try:
        seen: list[str] = []
        monkeypatch.setattr(Validator, "_passes", lambda self, document: seen.append(document.path) or [])
        assert Validator(RuleFormat(BUILT_IN.registry)).check(load_file(next(iter(shipped_packs())))) == []
        assert len(seen) == 1
    finally:
        parsed._seals.cache_clear()
