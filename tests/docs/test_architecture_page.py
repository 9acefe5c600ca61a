"""The walk through the code names files and definitions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`((?:healthcheck|tests)/[\w/]+\.py)(?:: ([\w.]+))?`", " ".join(PAGE.split()))))


def defined(path: Path) -> set[str]:
    """Top-level names of a module, and ``Class.method`` of its classes with those of their bases in the same file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_the_page_names_many_places() -> None:
    assert len([name for _, name in PLACES if name]) > 20


def test_what_the_page_names_is_there() -> None:
    missing = []
    for file, name in PLACES:
        path = ROOT / file
        if not path.is_file() or (name and name not in defined(path)):
            missing.append(f"{file}: {name}")
    assert missing == []
