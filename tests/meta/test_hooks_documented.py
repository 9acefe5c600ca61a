"""docs/plugins/hooks.md has every hook with its exact arguments, and no generated page is stale."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from healthcheck.core.events import EventKind
from healthcheck.extend import hookspecs

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith(hookspecs.PREFIX))


@pytest.fixture(scope="module")
def generator(helper: Callable[[str], ModuleType]) -> ModuleType:
    return helper("docs/_generate.py")


@pytest.fixture(scope="module")
def headings() -> list[str]:
    text = (DOCS / "plugins" / "hooks.md").read_text(encoding="utf-8")
    return re.findall(r"^### (healthcheck_\w+\(.*\))$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_a_heading_with_its_exact_arguments(name: str, headings: list[str]) -> None:
    arguments = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    assert headings.count(f"{name}({arguments})") == 1


def test_no_heading_describes_a_hook_that_does_not_exist(headings: list[str]) -> None:
    assert sorted(heading.split("(")[0] for heading in headings) == HOOKS


def test_every_event_has_a_hook() -> None:
    assert {hookspecs.loop_hook(kind) for kind in EventKind} <= set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_how_often_it_comes(name: str) -> None:
    """When, how often, on which ranks: the least that a plugin author needs."""
    text = (getattr(hookspecs, name).__doc__ or "").lower()
    assert re.search(r"\b(once|every|per|hot|rank|ranks)\b", text), name


def test_generated_files_are_fresh(generator: ModuleType) -> None:
    assert list(generator.differing()) == [], "run `make docs`"


def test_the_example_plugin_holds_nothing_but_what_plugins_new_writes(generator: ModuleType) -> None:
    """What an outsider copies from there is what the command gives."""
    folder = DOCS.parent / "plugins" / generator.EXAMPLE
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"plugins/{generator.EXAMPLE}/{name}" for name in listed.stdout.split()} <= set(generator.files())
