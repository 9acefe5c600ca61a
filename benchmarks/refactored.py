"""What became of the files that the package had before its rooms were built, by the names in them.

    python benchmarks/refactored.py [COMMIT]    # the commit to compare with; a clone with its history is needed

A file counts as kept if more than half of its functions and classes are found in one file of today: as folded where
several files have come together there, as moved where it is the only one. Names that more than a few files of today have
(`sample`, `update`) say nothing and are left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

BEFORE = "b34b4b9"
ROOT = Path(__file__).resolve().parents[1]
COMMON = 3
"""Files of today that a name is in, at most, if it is to tell anything."""


def names(tree: ast.AST) -> Iterator[str]:
    """Functions, methods and classes, without those that every class has."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("__"):
            yield node.name


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(commit: str = BEFORE) -> None:
    if subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True, check=False).returncode:
        print(f"{commit} is not in this clone: nothing to compare with")
        return
    listed = [f for f in git("ls-tree", "-r", "--name-only", commit, "healthcheck").split() if f.endswith(".py")]
    before = {file: git("show", f"{commit}:{file}") for file in listed}
    today: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "healthcheck").rglob("*.py"):
        for name in names(ast.parse(path.read_text(encoding="utf-8"))):
            today[name].add(path.relative_to(ROOT).as_posix())
    kept: dict[str, str] = {}
    empty: list[str] = []
    spread: list[str] = []
    for file, source in before.items():
        telling = [name for name in names(ast.parse(source)) if len(today[name]) <= COMMON]
        places = Counter(place for name in telling for place in today[name])
        (place, found), *_ = [*places.most_common(1), ("", 0)]
        if not any(True for _ in names(ast.parse(source))):
            empty.append(file)
        elif 2 * found > len(telling):
            kept[file] = place
        else:
            spread.append(file)
    sources = Counter(kept.values())
    folded = [file for file, place in kept.items() if sources[place] > 1]
    moved = [file for file, place in kept.items() if sources[place] == 1]
    lines = {file: len(source.splitlines()) for file, source in before.items()}
    print(f"{len(before)} files, {sum(lines.values()):,} lines at {commit}")
    for what, files in (("folded", folded), ("moved", moved), ("written again or spread", spread), ("empty", empty)):
        into = f" -> {len({kept[file] for file in files})}" if what == "folded" else ""
        print(f"{what:<24} {len(files)}{into} files, {sum(lines[file] for file in files):,} lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
