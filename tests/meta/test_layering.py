"""A module imports only from its own or an earlier layer. The list here is the one of the design."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "healthcheck"

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "core",
        "errors",
        "events",
        "samples",
        "verdicts",
        "protocols",
        "clock",
        "redact",
        "names",
        "references",
        "runinfo",
        "opener",
    ),
    ("hookspecs", "plugins", "dispatch", "registry"),
    ("rulelang",),
    ("engine",),
    (
        "session",
        "judging",
        "latch",
        "acting",
        "outcome",
        "probing",
        "watchdog",
        "contained",
        "callback",
        "budget",
    ),
    ("probes",),
    ("actions",),
    ("trainers",),
    ("record", "reports"),
    ("readers",),
    ("ruletests", "replay", "faults"),
    ("assembly",),
    ("commands",),
    ("pytesting", "testing"),
)
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}

ENTRANCES = {"__init__", "__main__"}
"""The package itself: lazy names and ``python -m healthcheck`` reach everything by nature."""

MAY_IMPORT_ASSEMBLY = {"assembly", "commands", "pytesting", "testing"} | ENTRANCES
NEVER_TORCH = {name for names in LAYERS[:4] for name in names}
"""Vocabulary, extension, rulelang, engine."""

ALLOWED = {
    (
        "commands/test.py",
        "pytesting",
    ): "`healthcheck test` is pytest with our plugin; it asks the plugin what it found",
}
"""Later layers that one module may import, inside a function, with the reason."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The name in ``LAYERS`` that a module belongs to: ``probes`` for ``probes/loss/loss.py``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, also those inside others. Expressions are most of a tree and hold no import."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.stmt, ast.excepthandler, ast.match_case))
        ]


@cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """Imported modules as (dotted name, line, only for type checking), those inside functions included."""
    nodes = list(statements(ast.parse(path.read_text(encoding="utf-8"), str(path))))
    typing_only = {
        child
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for child in statements(statement)
    }
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            if base == "healthcheck":  # `from healthcheck import engine` names the module in the alias
                found += [(f"{base}.{alias.name}", node.lineno, node in typing_only) for alias in node.names]
            else:
                found.append((base, node.lineno, node in typing_only))
    return tuple(found)


def shown(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_module_belongs_to_a_layer() -> None:
    strangers = [shown(path) for path in MODULES if part_of(path) not in ENTRANCES and part_of(path) not in LAYER]
    assert strangers == [], "add them to LAYERS where the design has them"


def test_a_module_imports_only_from_its_own_or_an_earlier_layer() -> None:
    later = []
    for path in MODULES:
        part = part_of(path)
        for name, line, typing_only in imports(path) if part in LAYER and part not in ENTRANCES else ():
            pieces = name.split(".")
            if pieces[0] != "healthcheck" or len(pieces) == 1 or typing_only:
                continue
            target = pieces[1]
            if target not in LAYER or (shown(path), target) in ALLOWED:
                continue  # a lazy public name, such as `from healthcheck import hookimpl`, or a known exception
            if LAYER[target] > LAYER[part]:
                later.append(f"{shown(path)}:{line}: {part} imports {name}, which is a later layer")
    assert later == []


def test_only_entrances_import_the_composition_root() -> None:
    assert [
        f"{shown(path)}:{line}: imports {name}"
        for path in MODULES
        if part_of(path) not in MAY_IMPORT_ASSEMBLY
        for name, line, typing_only in imports(path)
        if name.startswith("healthcheck.assembly") and not typing_only
    ] == []


def test_the_vocabulary_the_rule_language_and_the_engine_never_import_torch() -> None:
    assert [
        f"{shown(path)}:{line}: imports {name}"
        for path in MODULES
        if part_of(path) in NEVER_TORCH
        for name, line, _ in imports(path)
        if name.split(".")[0] == "torch"
    ] == []


def test_every_layer_of_the_list_that_exists_is_found() -> None:
    """A renamed folder must not leave the tests above looking at nothing."""
    assert {"errors", "hookspecs", "rulelang", "engine"} <= {part_of(path) for path in MODULES}
