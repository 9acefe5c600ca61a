"""The first thing that a reader of the README sees is what the command prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_picture_in_the_readme_is_the_output_of_the_demo() -> None:
    result = subprocess.run(
        [sys.executable, "docs/_update.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
