"""The first thing that a reader of the README sees is what the command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_counts_the_rules_of_now() -> None:
    from healthcheck.assembly import plugin_host
    from healthcheck.rulelang.compile import load_rules

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rules = load_rules("healthcheck:recommended", registry=plugin_host().registry).rules
    shown = [int(n) for n in re.findall(r"(\d+) rules of healthcheck:recommended", text)]
    assert shown == [len(rules)], "run: python docs/_update.py"
    assert len(re.findall(r"^  \d+ of \d+ checks that apply were judged", text, re.MULTILINE)) == 1


@pytest.mark.slow
def test_the_picture_in_the_readme_is_the_output_of_the_demo() -> None:
    result = subprocess.run(
        [sys.executable, "docs/_update.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
