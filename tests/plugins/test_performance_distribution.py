"""The distribution healthcheck-performance needs no private door; its own tests are beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[2] / "plugins" / "healthcheck-performance" / "healthcheck_performance"


def test_it_uses_public_names_alone(helper: Callable[[str], ModuleType]) -> None:
    private_uses = helper("tests/plugins/public_names.py").private_uses
    files = sorted(PACKAGE.glob("*.py"))
    assert len(files) > 5
    assert {file.name: uses for file in files if (uses := private_uses(file.read_text(encoding="utf-8")))} == {}
