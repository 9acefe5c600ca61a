"""``check --fix``: rewrite what has one sure answer: renamed ids, words of other tools, clear typos.

Only the text at the place of the problem changes; comments and layout stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from healthcheck.errors import Problem


def fixable(problem: Problem) -> bool:
    return problem.fix is not None and problem.line > 0


def fix_text(text: str, problems: Iterable[Problem]) -> tuple[str, list[Problem]]:
    """The mended text and the problems that were mended, from the end of the file backwards."""
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
