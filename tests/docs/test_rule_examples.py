"""Rule files that our pages tell people to write raise no mistake and no warning of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healthcheck.assembly import plugin_host
from healthcheck.rulelang.compile import load_all
from healthcheck.rulelang.loader import load_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
_BLOCK = re.compile(r"^```yaml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"^cat > \S+\.yaml <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)


def rule_files(page: Path) -> list[str]:
    """Whole rule files on a page: those that say their version and hold rules."""
    text = page.read_text(encoding="utf-8")
    found = [*_BLOCK.findall(text), *_HERE.findall(text)]
    whole = [block for block in found if re.search(r"^version: 1$", block, re.MULTILINE) and "\nrules:" in block]
    return [block for block in whole if "mine." not in block]  # those need the plugin that the page has you write


EXAMPLES = [(page, number, text) for page in PAGES for number, text in enumerate(rule_files(page), 1)]


def test_the_pages_have_examples() -> None:
    assert {page.name for page, _, _ in EXAMPLES} == {"README.md", "CONTRIBUTING.md", "first-run.md"}


@pytest.mark.parametrize(
    "text", [text for _, _, text in EXAMPLES], ids=[f"{page.stem}-{number}" for page, number, _ in EXAMPLES]
)
def test_an_example_raises_no_warning(text: str) -> None:
    loaded = load_all([load_text(text)], registry=plugin_host().registry)
    assert [str(problem) for problem in loaded.problems] == []
    assert loaded.ruleset.rules
