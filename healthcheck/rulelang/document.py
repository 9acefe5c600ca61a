"""A rule file in memory: its content, and the line and column of everything in it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from healthcheck.errors import Problem

KeyPath = tuple["str | int", ...]


@dataclass(slots=True)
class Mark:
    """Where a value stands, and its children. Line and column count from 1."""

    line: int
    column: int
    width: int
    quoted: bool = False
    children: dict[str | int, Mark] = field(default_factory=dict)
    keys: dict[str | int, Mark] = field(default_factory=dict)
    nodes: int = 1
    """Values in it, aliases counted as often as they are used."""


@dataclass(slots=True)
class Document:
    """One rule file, pack or dict: its content, and the place of everything in it."""

    path: str
    """As shown to people: a file name, a pack name, or ``rules`` for a dict."""
    data: Any = None
    root: Mark | None = None
    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    folder: FilePath | None = None
    """Where relative names in ``extends`` start."""
    own: bool = True
    """False for packs: their keys give way to a profile's defaults."""
    shared: bool = False
    """Whether the marks are those of every document with the same text."""

    def mark(self, where: KeyPath, *, key: bool = False) -> Mark | None:
        """The place of a value, or with ``key`` of the key itself; the nearest parent's if absent."""
        mark = self.root
        if mark is None:
            return None
        for depth, name in enumerate(where):
            last = depth == len(where) - 1
            if last and key and name in mark.keys:
                return mark.keys[name]
            if name not in mark.children:
                return mark.keys.get(name, mark)
            if last and not key and _is_block(mark.children[name]) and name in mark.keys:
                return mark.keys[name]  # a block value begins on its first inner line: show its key
            mark = mark.children[name]
        return mark

    def broken_within(self, where: KeyPath) -> bool:
        """Whether the loader had to leave something out inside this value (a refused key)."""
        mark = self.root
        for part in where:
            mark = mark.children.get(part) if mark is not None else None
        if mark is None or not self.problems:
            return False
        last = max([mark.line, *(m.line for m in _inner(mark))])
        head = self.mark(where, key=True) or mark
        return any(
            head.line < p.line <= last + 1 or (p.line == head.line and p.column > head.column) for p in self.problems
        )

    def rename(self, where: KeyPath, old: str, new: str) -> None:
        """Go on as if ``old`` had been written as ``new``, so that what is inside gets checked too."""
        if self.shared:
            self.root, self.shared = deepcopy(self.root), False
        data, mark = self.data, self.root
        for part in where:
            data = data[part]
            mark = mark.children.get(part) if mark is not None else None
        data[new] = data.pop(old)
        if mark is not None:
            for table in (mark.children, mark.keys):
                if old in table:
                    table[new] = table.pop(old)

    def problem(
        self,
        where: KeyPath,
        slug: str,
        message: str,
        *,
        key: bool = False,
        offset: int | None = None,
        width: int | None = None,
        severity: str = "error",
        suggestion: str = "",
        fix: tuple[str, str] | None = None,
    ) -> Problem:
        """A problem at a key path. ``offset`` counts characters into a one-line scalar."""
        mark = self.mark(where, key=key)
        if mark is None:
            place = f"{self.path}: {key_path(where)}" if where else self.path
            return Problem(place, 0, 0, slug, message, severity, suggestion, fix=fix)
        column, wide = mark.column, mark.width
        if offset is not None and mark.width > 1:
            column += offset + (1 if mark.quoted else 0)
            wide = width or 1
        source = self.lines[mark.line - 1] if 0 < mark.line <= len(self.lines) else ""
        return Problem(self.path, mark.line, column, slug, message, severity, suggestion, source, wide, fix)


def key_path(where: KeyPath) -> str:
    """``rules.loss-spike.when[0]``."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _inner(mark: Mark) -> Iterator[Mark]:
    """All marks of a value's keys and children."""
    stack = [mark]
    while stack:
        top = stack.pop()
        yield from top.keys.values()
        for child in top.children.values():
            yield child
            stack.append(child)


def _is_block(mark: Mark) -> bool:
    return mark.width == 0
