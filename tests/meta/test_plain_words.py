"""The words that CONTRIBUTING calls awkward stand neither on our pages nor in any text that the package prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HEADING = "## How we write"
PAGES = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of rules are written with their rules; the map of files is made of docstrings.
PAGES = [page for page in PAGES if page.parent.name != "rules" and page.name != "source-map.md"]
SOURCES = sorted((ROOT / "healthcheck").rglob("*.py"))


def section() -> str:
    """The text of the section with the table, which names the words itself."""
    return CONTRIBUTING.read_text(encoding="utf-8").split(HEADING)[1].partition("\n## ")[0]


def awkward() -> dict[str, str]:
    """Awkward phrase -> what to write."""
    rows = [line.strip("| \n").split("|") for line in section().splitlines() if line.startswith("|")][2:]
    return {phrase.strip(): row[1].strip() for row in rows for phrase in row[0].split(",")}


PHRASES = re.compile(r"\b(?:" + "|".join(map(re.escape, awkward())) + r")\b(?! longer| more)", re.IGNORECASE)


def found(text: str) -> list[str]:
    """What to change in a text, with the plain words; line breaks count as spaces."""
    table = {phrase.lower(): plain for phrase, plain in awkward().items()}
    flat = " ".join(text.split())
    hits = list(PHRASES.finditer(flat))
    return [f'"{flat[max(0, m.start() - 30) : m.end() + 30]}": write {table[m[0].lower()]}' for m in hits]


def printed(source: str) -> Iterator[str]:
    """All texts of a module that are no docstrings; of an f-string all its parts, with `{}` for the values."""
    tree = ast.parse(source)
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_table_is_read() -> None:
    table = awkward()
    assert table["beyond doubt"] == "certainly"
    assert table["mended"] == "fix"
    assert found("a file of ours is mended at one\nstroke") == [
        '"a file of ours is mended at one stroke": write our own, healthcheck\'s',
        '"a file of ours is mended at one stroke": write fix',
        '"a file of ours is mended at one stroke": write in a single step',
    ]


def test_texts_are_found_in_code_and_docstrings_are_not() -> None:
    source = '"""of ours"""\ndef f(x):\n    """of ours"""\n    return f"a file of ours: {x}" + "of ours"\n'
    assert sorted(printed(source)) == ["a file of ours: {}", "of ours"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page == CONTRIBUTING:
        text = text.replace(section(), "")
    if page.name == "words.md":
        text = text.partition("## Retired")[0]
    assert found(text) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_printed_text_is_in_plain_words(path: Path) -> None:
    hits = [hit for text in printed(path.read_text(encoding="utf-8")) for hit in found(text)]
    assert hits == []
