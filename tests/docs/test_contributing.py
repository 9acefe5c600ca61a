"""A stranger's five: rule, metric, condition, action and reader, each built in by following CONTRIBUTING.md alone.

The lists under "Built in" are read from the page and done in a copy of a clean clone, as a person would do them: files
written, lines added, commands typed. Nothing else may change there, and what the page does not name may not change either.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^(`{3,})(\w*)([^\n]*)\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+\.\w+|[\w./-]+/)`")
TITLES = ("A rule", "A metric", "A condition", "An action", "A reader")


@dataclass(frozen=True)
class Step:
    """One block of a list, with the sentence before it that says what to do with it."""

    said: str
    language: str
    text: str

    @property
    def file(self) -> str:
        found = FILE.search(self.said)
        assert found is not None, f"no file is named: {self.said}"
        return found[1]


def built_in(title: str) -> str:
    """The part "Built in" of a section."""
    outside = FENCE.sub(
        lambda match: re.sub(r"^#", "\0", match[0], flags=re.MULTILINE), PAGE
    )  # headings in blocks are none
    [section] = [s for s in re.split(r"^## ", outside, flags=re.MULTILINE) if s.startswith(f"{title}\n")]
    return section.split("\n### Built in\n", 1)[1].replace("\0", "#")


def steps_of(text: str) -> list[Step]:
    found, end = [], 0
    for match in FENCE.finditer(text):
        said = text[end : match.start()].strip().rpartition("\n\n")[2]
        found.append(Step(" ".join(said.split()), f"{match[2]}{match[3]}", match[4]))
        end = match.end()
    return found


def follow(step: Step, clone: Path) -> None:
    """Do what the sentence says."""
    path = clone / step.file
    if step.said.startswith("New, "):
        assert not path.exists(), f"{step.file} is there already"
        path.write_text(step.text, encoding="utf-8")
    elif step.said.startswith("At the end of "):
        path.write_text(f"{path.read_text(encoding='utf-8')}\n{step.text}", encoding="utf-8")
    elif "as the last row" in step.said:
        path.write_text(add_row(path.read_text(encoding="utf-8"), step.text), encoding="utf-8")
    elif step.said.startswith("In "):
        path.write_text(add_to_tuple(path.read_text(encoding="utf-8"), step.text), encoding="utf-8")
    else:
        raise AssertionError(f"nobody can tell what to do: {step.said}")


def add_row(text: str, row: str) -> str:
    """Below the last row of the page's first table."""
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return text[: table.end()] + row + text[table.end() :]


def add_to_tuple(text: str, shown: str) -> str:
    """Imports among the imports, in their order, and ``NAME = (..., New)`` at the end of the tuple."""
    imports = re.findall(r"^from .+$", shown, re.MULTILINE)
    [(name, new)] = re.findall(r"^(\w+) = \(\.\.\., (.+)\)$", shown, re.MULTILINE)
    there = re.findall(r"^from healthcheck.+$", text, re.MULTILINE)
    for line in imports:
        after = max((i for i in there if i < line), default=there[0])
        text = text.replace(f"{after}\n", f"{after}\n{line}\n", 1)
    start = re.search(rf"^{name}\b[^\n]*= \(\n", text, re.MULTILINE)
    assert start is not None, f"no tuple {name}"
    end = text.index("\n)\n", start.end())
    return f"{text[:end]}\n    {new},{text[end:]}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, clone: Callable[[Path], Path]) -> Path:
    """A clone with a ``.venv`` in which it is installed as `make check` does it; the requirements are lent to it."""
    folder = clone(tmp_path_factory.mktemp("stranger") / "torch-healthcheck")
    binaries = folder / ".venv" / "bin"
    venv.create(folder / ".venv", with_pip=False)
    [site] = (folder / ".venv").glob("lib/python*/site-packages")
    lent = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--no-build-isolation", "-e", str(folder)], check=True)
    for module in ("pytest", "mypy"):
        (binaries / module).write_text(f'#!/bin/sh\nexec {binaries}/python -m {module} "$@"\n', encoding="utf-8")
        (binaries / module).chmod(0o755)
    (binaries / "ruff").symlink_to(Path(sys.executable).with_name("ruff").resolve())
    for mark in (".ready", ".frameworks"):
        (folder / ".venv" / mark).touch()
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "clone")
    return folder


@pytest.fixture
def copy(installed: Path) -> Iterator[Path]:
    """The clone as it was cloned, for each test."""
    yield installed
    git(installed, "reset", "-q", "--hard")
    git(installed, "clean", "-qfd")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def shell(command: str, folder: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "PYTEST", "PYTHON", "MAKE"))}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{folder}/.venv/bin{os.pathsep}{env['PATH']}"}
    result = subprocess.run(
        ["bash", "-exo", "pipefail", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}{result.stderr[-2000:]}"


def changed(folder: Path) -> set[str]:
    return {line[3:] for line in git(folder, "status", "--porcelain", "--untracked-files=all").splitlines()}


def do(title: str, folder: Path) -> str:
    """All that the list says, but for its last block, which are the commands that check it; returns those."""
    *steps, check = steps_of(built_in(title))
    assert check.language == "bash check"
    for step in steps:
        follow(step, folder)
    return check.text


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_what_the_page_lists_is_all_that_it_takes(title: str, copy: Path) -> None:
    shell(do(title, copy), copy)
    named = FILE.findall(built_in(title))
    unnamed = {
        path for path in changed(copy) if not any(path == n or (n[-1] == "/" and path.startswith(n)) for n in named)
    }
    assert unnamed == set(), "CONTRIBUTING.md does not name them"
    assert {step.file for step in steps_of(built_in(title))[:-1]} <= changed(copy)


@pytest.mark.slow
def test_all_five_together_pass_lint_and_types(copy: Path) -> None:
    for title in TITLES:
        do(title, copy)
    shell("make docs golden\nmake lint\npytest -q -m 'not slow' tests/meta tests/docs", copy)


def test_each_part_has_its_place_on_the_page() -> None:
    """Both ways: in a file of one's own, and built in."""
    for title in TITLES:
        section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n### Built in\n", 1)[0]
        assert "```bash runnable\n" in section, title
        assert len(steps_of(built_in(title))) >= 3, title
