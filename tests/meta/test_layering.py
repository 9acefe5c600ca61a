"""The rooms of the package and the direction of imports between them. The list is the one of the design.

A room imports from itself and from rooms above it. Imports for type checking and imports inside functions
count like any other: a reader follows them all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "healthcheck"

ROOMS = (
    "core",
    "extend",
    "rulelang",
    "engine",
    "run",
    "device",
    "probes",
    "actions",
    "instrument",
    "trainers",
    "record",
    "reports",
    "readers",
    "replay",
    "ruletests",
    "faults",
    "assembly",
    "testing",
    "pytesting",
    "cli",
    "site",
)
PLACE = {name: i for i, name in enumerate(ROOMS)}

ENTRANCES = {"__init__", "__main__"}
"""The package itself: lazy names and ``python -m healthcheck`` reach everything by nature."""

MAY_IMPORT_THE_PACKAGE = {"assembly", "testing", "pytesting", "cli"} | ENTRANCES
MAY_IMPORT_ASSEMBLY = MAY_IMPORT_THE_PACKAGE
NEVER_TORCH = {"core", "extend", "rulelang", "engine"}
LONGEST = 600
"""Lines of a file. Not a goal: past it there is a second idea to look for."""


MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The name in ``ROOMS`` that a module belongs to: ``probes`` for ``probes/loss/loss.py``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for path in MODULES}


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
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Imported modules as (dotted name, line); ``from package import module`` names the module."""
    found = []
    for node in statements(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((full if full in FILES else base, node.lineno))
    return tuple(dict.fromkeys(found))


def shown(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_module_belongs_to_a_room() -> None:
    strangers = [shown(path) for path in MODULES if room_of(path) not in ENTRANCES and room_of(path) not in PLACE]
    assert strangers == [], "put them where the design has them"


def test_every_room_exists() -> None:
    """A renamed folder must not leave the tests here looking at nothing."""
    assert {room_of(path) for path in MODULES} - ENTRANCES == set(ROOMS)


def test_a_module_imports_only_from_its_own_room_or_one_above() -> None:
    below = []
    for path in MODULES:
        room = room_of(path)
        for name, line in imports(path) if room in PLACE else ():
            pieces = name.split(".")
            if pieces[0] == "healthcheck" and len(pieces) > 1 and PLACE.get(pieces[1], -1) > PLACE[room]:
                below.append(f"{shown(path)}:{line}: {room} imports {name}, which is further down")
    assert below == []


def test_the_package_itself_is_imported_only_where_everything_is_put_together() -> None:
    assert [
        f"{shown(path)}:{line}: imports the package"
        for path in MODULES
        if room_of(path) not in MAY_IMPORT_THE_PACKAGE
        for name, line in imports(path)
        if name == "healthcheck"
    ] == []


def test_only_entrances_import_the_composition_root() -> None:
    assert [
        f"{shown(path)}:{line}: imports {name}"
        for path in MODULES
        if room_of(path) not in MAY_IMPORT_ASSEMBLY
        for name, line in imports(path)
        if name.startswith("healthcheck.assembly")
    ] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Found as in Tarjan's algorithm: a component of more than one file is a circle."""
    edges = {name: {n for n, _ in imports(path) if n in FILES and n != name} for name, path in FILES.items()}
    edges.pop("healthcheck", None)  # the lazy names reach everything
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in edges:
                continue
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = [stack.pop()]
            while component[-1] != name:
                component.append(stack.pop())
            if len(component) > 1:
                circles.append(sorted(component))

    for name in edges:
        if name not in index:
            visit(name)
    assert circles == []


def test_the_upper_rooms_never_import_torch() -> None:
    assert [
        f"{shown(path)}:{line}: imports {name}"
        for path in MODULES
        if room_of(path) in NEVER_TORCH
        for name, line in imports(path)
        if name.split(".")[0] == "torch"
    ] == []


def test_no_file_holds_more_than_one_can_read() -> None:
    assert [
        f"{shown(path)}: {lines} lines"
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST
    ] == []
