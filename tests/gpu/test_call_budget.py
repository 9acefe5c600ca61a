"""Python calls of a step of which a device has the numbers: as on a host, in ``tests/trainers/test_call_budget.py``."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

COUNTS = Path(__file__).parents[1] / "trainers" / "call_counts.py"


def calls(rules: str) -> list[int]:
    """Of each of 640 steps."""
    done = subprocess.run(
        [sys.executable, str(COUNTS), "--device", "cuda", "--rules", rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["exit"], found["said"]) == (0, [])
    return list(found["steps"])


@pytest.mark.parametrize(("rules", "usual", "mean"), [("twenty", 27, 30), ("healthcheck:recommended", 28, 40)])
def test_a_step_keeps_to_its_budget(rules: str, usual: int, mean: int) -> None:
    spent = calls(rules)
    assert statistics.quantiles(spent, n=10)[0] <= usual
    assert statistics.mean(spent) <= mean
