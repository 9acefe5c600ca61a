"""Problems for people and programs: text with a caret, one line each, JSON, GitHub annotations, or mended on the spot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.text import visible, visible_lines

SHOWN = 20
"""Problems that the text form prints in full; the rest is counted."""


ENOUGH = 500
"""Problems of one kind after which looking for more stops: hostile files must not take minutes."""


def ordered(problems: Iterable[Problem], paths: Iterable[str] = ()) -> list[Problem]:
    """By file (those in ``paths`` first, then in order of appearance), line and column."""
    listed = list(problems)
    files = {path: i for i, path in enumerate(dict.fromkeys([*paths, *(p.path for p in listed)]))}
    return sorted(listed, key=lambda p: (files[p.path], p.line, p.column))


def render_text(problems: Sequence[Problem], *, quiet: bool = False, limit: int = SHOWN) -> str:
    """``file:line:col: error[slug]: message``, the source line with a caret, the way out."""
    lines: list[str] = []
    for problem in problems[:limit] if limit else problems:
        lines.extend(map(visible, [str(problem)] if quiet else _with_caret(problem)))
    if limit and len(problems) > limit:
        lines.append(f"... and {len(problems) - limit} more")
    return "\n".join(lines)


def _with_caret(problem: Problem) -> Iterator[str]:
    place = f"{problem.path}:{problem.line}:{problem.column}" if problem.line else problem.path
    yield f"{place}: {problem.severity}[{problem.slug}]: {problem.message}"
    if problem.line and problem.source.strip():
        number = f"{problem.line:>5}"
        cut = max(0, problem.column - 80)
        source = problem.source[cut : cut + 140].expandtabs(1)
        yield f"{number} | {source}"
        room = max(1, len(source) - (problem.column - 1 - cut))
        before = len(visible(source[: problem.column - 1 - cut]))  # what is escaped is wider than it was
        yield f"{' ' * len(number)} | {' ' * before}{'^' * max(1, min(problem.width, room))}"
    if problem.suggestion:
        yield f"  {problem.suggestion}"


def to_json(problem: Problem) -> dict[str, Any]:
    """One problem for ``--format json``."""
    shaped: dict[str, Any] = {
        "path": problem.path,
        "line": problem.line,
        "column": problem.column,
        "severity": problem.severity,
        "slug": problem.slug,
        "message": problem.message,
    }
    if problem.suggestion:
        shaped["suggestion"] = problem.suggestion
    if problem.fix:
        shaped["fix"] = {"old": problem.fix[0], "new": problem.fix[1]}
    return shaped


def render_github(problems: Sequence[Problem]) -> str:
    """GitHub workflow commands: annotations at the lines of the rule files."""
    lines = []
    for problem in problems:
        kind = {"error": "error", "warning": "warning"}.get(problem.severity, "notice")
        place = f"file={_escape(problem.path, True)}"
        if problem.line:
            place += f",line={problem.line},col={problem.column}"
        hint = f" ({problem.suggestion})" if problem.suggestion else ""
        lines.append(f"::{kind} {place},title={_escape(problem.slug, True)}::{_escape(problem.message + hint, False)}")
    return "\n".join(lines)


def _escape(text: str, in_property: bool) -> str:
    text = visible_lines(text).replace("%", "%25").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text


# --------------------------------------------------------------------------- `check --fix`


def fixable(problem: Problem) -> bool:
    """Whether there is one sure answer: a renamed id, a word of another tool, a clear typo."""
    return problem.fix is not None and problem.line > 0


def fix_text(text: str, problems: Iterable[Problem]) -> tuple[str, list[Problem]]:
    """The mended text and the problems that were mended. Comments and layout stay as they are."""
    lines = text.splitlines(keepends=True)
    done: list[Problem] = []
    for problem in sorted(filter(fixable, problems), key=lambda p: (p.line, p.column), reverse=True):
        assert problem.fix is not None
        old, new = problem.fix
        if problem.line > len(lines):
            continue
        line, at = lines[problem.line - 1], problem.column - 1
        if line[at : at + 1] in ("'", '"'):
            at += 1
        if line[at : at + len(old)] == old:
            lines[problem.line - 1] = line[:at] + new + line[at + len(old) :]
            done.append(problem)
    return "".join(lines), done[::-1]


def fix_file(path: Path, problems: Iterable[Problem]) -> list[Problem]:
    """Mend a file in place; the write is atomic. Returns what was mended."""
    text = path.read_bytes().decode("utf-8")
    mended, done = fix_text(text, problems)
    if done:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(mended.encode("utf-8"))
        part.chmod(path.stat().st_mode & 0o777)
        part.replace(path)
    return done
