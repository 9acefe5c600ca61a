"""Files in ``bad/`` give exactly the errors beside them; files in ``good/`` load without any.

After a deliberate change: ``HEALTHCHECK_UPDATE_GOLDEN=1 pytest tests/rulefile`` and read the diff.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from healthcheck.rulelang import sources
from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.problems import render_text

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit" / "rulelang"))
from language import registry  # noqa: E402

BAD = sorted((HERE / "bad").glob("*.yaml"))
GOOD = sorted((HERE / "good").glob("*.yaml"))
UPDATE = os.environ.get("HEALTHCHECK_UPDATE_GOLDEN", "") not in ("", "0")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A registry whose only pack is one that no release can change."""
    folder = tmp_path_factory.mktemp("packs")
    (folder / "recommended.yaml").write_text("version: 1\nrules: {}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "pack_folder", lambda: folder)
        yield registry()


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.stem)
def test_a_bad_file_is_answered_in_the_words_of_its_golden_text(path: Path, known, monkeypatch) -> None:
    monkeypatch.chdir(HERE / "bad")

    loaded = load_all([path.name], registry=known)

    assert loaded.errors, "the file was accepted"
    text = render_text(loaded.problems, limit=0) + "\n"
    golden = path.with_suffix(".txt")
    if UPDATE:
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.stem)
def test_a_good_file_loads_without_an_error(path: Path, known, monkeypatch) -> None:
    monkeypatch.chdir(HERE / "good")

    loaded = load_all([path.name], registry=known)

    assert [str(p) for p in loaded.errors] == []
    assert loaded.ruleset.rules


def test_there_are_many_kinds_of_mistake_and_each_has_its_golden_text() -> None:
    assert len(BAD) >= 40
    assert {p.stem for p in BAD} == {p.stem for p in (HERE / "bad").glob("*.txt")}


def test_every_error_names_line_column_and_slug() -> None:
    """An error without a place sends people searching. Files that cannot be placed are named as a whole."""
    placeless = {"empty", "latin1"}
    for golden in (HERE / "bad").glob("*.txt"):
        first = golden.read_text(encoding="utf-8").splitlines()[0]
        place = first.split(": ")[0]
        assert first.startswith(golden.stem + ".yaml")
        assert place.count(":") == 2 or golden.stem in placeless, first
