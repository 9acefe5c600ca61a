"""The order in which a function calls others, read from its source: for drivers and real packages alike."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

WHEELS = "HEALTHCHECK_TRAINER_WHEELS"
"""Environment variable: a folder with unpacked wheels, one folder each, for packages that cannot be installed."""


def real_files(inside: str) -> list[Path]:
    """A file of a real package, wherever it is: installed here, or among the unpacked wheels. Imports nothing."""
    found = [Path(entry) / inside for entry in sys.path]
    if folder := os.environ.get(WHEELS):
        found += [wheel / inside for wheel in sorted(Path(folder).iterdir())]
    return [path for path in found if path.is_file()]


def calls(path: Path, function: str, wanted: Iterable[str]) -> list[str]:
    """Names out of ``wanted`` that a function calls, fires as an event, or counts up, in source order.

    ``manager.fire("on_train_start", ...)`` counts as ``on_train_start``; ``state.step += 1`` as ``step``.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definition = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    names = set(wanted)
    return [name for name in _names(definition) if name in names]


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            for part in (*child.args, *child.keywords):
                yield from _names(part)
                if isinstance(part, ast.Call):
                    yield from _call(part)
            yield from _call(child)
        elif isinstance(child, ast.AugAssign) and isinstance(child.target, ast.Attribute):
            yield child.target.attr
        else:
            yield from _names(child)


def _call(node: ast.Call) -> Iterator[str]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "fire" and node.args:
        event = node.args[0]
        yield event.value if isinstance(event, ast.Constant) else f"fire({getattr(event, 'id', '?')})"
    elif called:
        yield called
