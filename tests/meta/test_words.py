"""Words that the page of words has retired stand nowhere in the code: no identifier, module name or docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "words.md"
SOURCES = [
    *sorted((ROOT / "healthcheck").rglob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "plugins").rglob("*.py")),
]


def retired() -> set[str]:
    """The words in the first column of the last table of the page."""
    table = PAGE.read_text(encoding="utf-8").split("## Retired")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    return {word.strip() for row in rows for word in row.split(",")}


def words(text: str) -> set[str]:
    """Single lower-case words of a text or an identifier, `snake_case` and `CamelCase` taken apart."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def said(path: Path) -> set[str]:
    """All words of a file's name, its identifiers and its docstrings."""
    found = words(path.stem)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found |= words(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found |= words(name)
            case ast.Expr(value=ast.Constant(value=str(text))):
                found |= words(text)
            case _:
                pass
    return found


def test_the_page_lists_retired_words() -> None:
    assert {"told", "duel", "bystander", "landmark", "parcel", "letter"} <= retired()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_retired_word_is_left(path: Path) -> None:
    assert said(path) & retired() == set()
