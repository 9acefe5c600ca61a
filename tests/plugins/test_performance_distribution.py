"""The distribution healthcheck-performance needs no private door; its own tests are beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "plugins" / "healthcheck-performance" / "healthcheck_performance"


def test_it_uses_public_names_alone(helper: Callable[[str], ModuleType]) -> None:
    private_uses = helper("tests/plugins/public_names.py").private_uses
    stability = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    promised = helper("tests/meta/test_public_api.py").promised_of_frameworks(stability)
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py"))}
    assert len(files) > 5
    assert {name: uses for name, source in files.items() if (uses := private_uses(source, promised))} == {}
