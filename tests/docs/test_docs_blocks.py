"""What the documentation tells people to do is done here.

- the blocks of a page are executed in their order, in a copy of a clean clone: nothing lies there but what git knows
  (pages for those who have installed the package alone write down all that they use);
- ```` ```python ```` blocks each in a process of its own;
- ```` ```bash runnable ```` blocks too; `runnable exit=1` says how the last command must end;
- ```` ```yaml ```` blocks with a line `version:` must be valid rule files;
- relative links must lead to a file.

A python block that cannot run says `no-run`; it must still be valid Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "plugins/*/*.md")
    for path in ROOT.glob(pattern)
    if "healthcheck-runs" not in path.parts
)
FENCE = re.compile(r"^(`{3,})(\w+)?([^\n]*)\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def expected_exit(self) -> int:
        return next((int(word.removeprefix("exit=")) for word in self.words if word.startswith("exit=")), 0)


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[2] or "", tuple(match[3].split()), match[4]))
    return found


BLOCKS = blocks()
PYTHON = [b for b in BLOCKS if b.language == "python"]
BASH = [b for b in BLOCKS if b.language == "bash" and "runnable" in b.words]
RULES = [
    b
    for b in BLOCKS
    # Those of the example plugin are checked where it is installed: tests/plugins.
    if b.language in ("yaml", "yml") and "needs-plugin" not in b.words and re.search(r"^version:", b.text, re.MULTILINE)
]


def environment(folder: Path) -> dict[str, str]:
    """As after `source .venv/bin/activate` in the clone, whose own package is used."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "PYTHON"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")])
    return clean | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def clone_of(tmp_path_factory: pytest.TempPathFactory, clone: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A copy of a clean clone for each page; what a block leaves there the next ones find."""
    made: dict[Path, Path] = {}

    def folder(page: Path) -> Path:
        if page not in made:
            made[page] = clone(tmp_path_factory.mktemp(page.stem))
        return made[page]

    return folder


def run(block: Block, folder: Path, *command: str) -> None:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    said = f"{block} exited {result.returncode}, not {block.expected_exit}\n{result.stdout}{result.stderr}"
    assert result.returncode == block.expected_exit, said


def test_every_python_block_is_valid() -> None:
    for block in PYTHON:
        compile(block.text, str(block), "exec")


RUN = [b for b in BLOCKS if (b in PYTHON and "no-run" not in b.words) or b in BASH]


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs(block: Block, clone_of: Callable[[Path], Path]) -> None:
    how = (sys.executable, "-c") if block.language == "python" else ("bash", "-euo", "pipefail", "-c")
    run(block, clone_of(block.page), *how, block.text)


@pytest.mark.parametrize("block", RULES, ids=str)
def test_a_rule_file_block_is_valid(block: Block, tmp_path: Path) -> None:
    from healthcheck.cli import main

    path = tmp_path / "healthcheck.yaml"
    path.write_text(block.text, encoding="utf-8")
    if "\naccepted:" in block.text:  # the other file of ours
        from healthcheck.rulelang.accepted import load_accepted

        assert load_accepted(path).entries
        return
    assert main(["check", str(path)]) == 0


def links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", t)]


def test_relative_links_lead_somewhere() -> None:
    """All pages in one test: of two hundred tests each would take longer to set up than to run."""
    astray = [f"{page}: {target}" for page in PAGES for target in links(page) if not (page.parent / target).exists()]
    assert astray == []


def test_fences_are_closed() -> None:
    """An unclosed block would hide all that follows it from the tests above."""
    odd = [str(page) for page in PAGES if len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)) % 2]
    assert odd == []


def test_the_pages_have_blocks_to_run() -> None:
    assert PYTHON
    assert BASH
    assert RULES


def test_the_tutorial_spells_out_the_script_that_its_blocks_run() -> None:
    """Who has installed the package has no checkout: the script must be on the page."""
    page = (ROOT / "docs" / "tutorial" / "first-run.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "train.py").read_text(encoding="utf-8").rstrip() in page


def test_what_a_block_imports_from_us_is_promised_to_last(helper: Callable[[str], ModuleType]) -> None:
    """What a page shows, people copy."""
    private_uses = helper("tests/plugins/public_names.py").private_uses
    stability = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    promised = helper("tests/meta/test_public_api.py").promised_of_frameworks(stability)
    package = ROOT / "CONTRIBUTING.md"  # its blocks that are not run are files of the package itself
    shown = [(b, b.text) for b in PYTHON if b.page != package or "no-run" not in b.words]
    shown += [
        (b, text) for b in BASH for text in re.findall(r"^cat >+ \S+\.py <<'END'\n(.*?)^END$", b.text, re.M | re.S)
    ]
    found = {str(block): uses for block, text in shown if (uses := private_uses(text, promised))}
    assert found == {}
