"""A YAML file in memory: its content, and the line and column of everything in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from healthcheck.core.errors import Problem
from healthcheck.core.redact import redact_text
from healthcheck.rulelang.rule import Origin

KeyPath = tuple["str | int", ...]

MAX_NODES = 200_000
"""Values of one document, those of aliases counted as often as they are used."""
MAX_DEPTH = 40

LONGEST_SHOWN = 2_000
"""Characters of a line up to which it is shown beside a problem: secrets in it are looked for first, and that takes time."""

Place = tuple[int, int, int, bool, "dict[str | int, tuple[Place | None, Place]] | None"]
"""A value of a YAML text: line, column, width (0 for a block), whether it is quoted, and what is in it, by key or
index: the place of the key (None in a list) and that of the value. Never changed once made.

Plain tuples, because one stands for every value of every pack, and of tuples the garbage collector loses sight."""


class Mark(NamedTuple):
    """Where a key or value stands. Line and column count from 1."""

    line: int
    column: int
    width: int
    quoted: bool = False


@dataclass(slots=True)
class Document:
    """One rule file, pack or dict: its content, and the place of everything in it."""

    path: str
    """As shown to people: a file name, a pack name, or ``rules`` for a dict."""
    data: Any = None
    root: Place | None = None
    """None for a dict, and where nothing could be read."""
    lines: list[str] = field(default_factory=list)
    text: str = ""
    """The whole of it, where it was read without a mistake."""
    problems: list[Problem] = field(default_factory=list)
    folder: FilePath | None = None
    """Where relative names in ``extends`` start."""
    own: bool = True
    """False for packs: their keys give way to a profile's defaults."""
    shipped: bool = False
    """Whether this is a pack of this distribution: nobody has written a secret into it."""
    layer: int = 0
    """0 for what the run was opened with; others count up in the order in which they joined it."""
    named: bool = False
    """Whether a person names this pack, in `extends` of a file of theirs or on the command line."""
    renamed: dict[KeyPath, str] = field(default_factory=dict)
    """Path of a key that is read as another one -> the key as it is written."""

    def mark(self, where: KeyPath, *, key: bool = False) -> Mark | None:
        """The place of a value, or with ``key`` of the key itself; the nearest parent's if absent."""
        if self.root is None:
            return None
        place = self.root
        for depth in range(len(where)):
            found = self._inside(place, where[: depth + 1])
            if found is None:
                break
            key_place, place = found
            # A block value begins on its first inner line, far from what a person looks for: show its key.
            if depth == len(where) - 1 and key_place is not None and (key or not place[2]):
                return Mark(*key_place[:4])
        line, column, width, quoted, _ = place
        return Mark(line, column, width or 1, quoted)

    def origin(self, where: KeyPath, *, key: bool = False) -> Origin:
        """The place of a value or key, to be kept when the document is gone."""
        mark = self.mark(where, key=key)
        return Origin(self.path, mark.line, mark.column) if mark else Origin(self.path)

    def broken_within(self, where: KeyPath) -> bool:
        """Whether something inside this value had to be left out (a key given twice, a merge key)."""
        if self.root is None or not self.problems:
            return False
        place = self.root
        for depth in range(len(where)):
            found = self._inside(place, where[: depth + 1])
            if found is None:
                return False
            place = found[1]
        last = max(inner[0] for inner in _all_in(place))
        head = self.mark(where, key=True)
        assert head is not None
        # One line more: the key that was left out may be the last one.
        return any(
            head.line < p.line <= last + 1 or (p.line == head.line and p.column > head.column) for p in self.problems
        )

    def rename(self, where: KeyPath, old: str, new: str) -> None:
        """Go on as if ``old`` had been written as ``new``, so that what is inside gets checked too."""
        data = self.data
        for part in where:
            data = data[part]
        data[new] = data.pop(old)
        before, after = (*where, old), (*where, new)
        self.renamed[after] = self.renamed.pop(before, old)

    def _inside(self, place: Place, where: KeyPath) -> tuple[Place | None, Place] | None:
        """What the last part of ``where`` names in a place: its key's place and its own."""
        name = self.renamed.get(where, where[-1]) if self.renamed else where[-1]
        return place[4].get(name) if place[4] else None

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
        if offset is not None and mark.width > 1:
            mark = Mark(mark.line, mark.column + offset + (1 if mark.quoted else 0), width or 1)
        return self.problem_at(mark, slug, message, severity=severity, suggestion=suggestion, fix=fix)

    def problem_at(
        self,
        mark: Mark,
        slug: str,
        message: str,
        *,
        severity: str = "error",
        suggestion: str = "",
        fix: tuple[str, str] | None = None,
    ) -> Problem:
        """A problem at a place of the text."""
        source = self.lines[mark.line - 1] if 0 < mark.line <= len(self.lines) else ""
        source = redact_text(source) if len(source) <= LONGEST_SHOWN else ""
        return Problem(self.path, mark.line, mark.column, slug, message, severity, suggestion, source, mark.width, fix)


def key_path(where: KeyPath) -> str:
    """``rules.loss-spike.when[0]``."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _all_in(place: Place) -> Iterator[Place]:
    """A value and all keys and values in it."""
    waiting = [place]
    while waiting:
        top = waiting.pop()
        yield top
        for key_place, inner in (top[4] or {}).values():
            waiting += [inner] if key_place is None else [key_place, inner]
