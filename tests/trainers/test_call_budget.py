"""What a step of training costs in a whole session, counted in calls of our Python functions.

Times are measured by ``benchmarks/overhead.py``. A count is the same on every machine, however busy, and shows the
kind of mistake that makes each step dearer: a call per tensor or per sample that could have been made once, a probe
that looks where no rule is due, an event that is built for nobody.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@functools.cache
def counted(script: str = "plain", rules: str = "healthcheck:recommended", layers: int = 8) -> dict[str, Any]:
    """640 steps of an unmodified script, once the run has settled."""
    here = Path(__file__).with_name("call_counts.py")
    done = subprocess.run(
        [sys.executable, str(here), "--rules", rules, "--script", script, "--layers", str(layers)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["exit"] == 0
    assert found["said"] == []
    return found


def calls(script: str = "plain", **given: Any) -> list[int]:
    """Of each counted step."""
    return list(counted(script, **given)["steps"])


def usual(spent: list[int]) -> float:
    """Of a step in which nobody takes a closer look: most looks come every twentieth or hundredth step."""
    return statistics.quantiles(spent, n=10)[0]


def test_who_is_called_is_worked_out_only_for_steps_that_are_unlike_the_one_before() -> None:
    found = counted()
    assert 0 < found["planned"] <= 0.5 * len(found["steps"])


def test_a_step_keeps_to_its_budget() -> None:
    assert usual(calls()) <= 23
    assert statistics.mean(calls()) <= 40


def test_under_twenty_rules_a_step_is_less() -> None:
    assert usual(calls(rules="twenty")) <= 23
    assert statistics.mean(calls(rules="twenty")) <= 30


def test_a_step_with_a_loader_groups_clipping_and_a_schedule_is_hardly_more() -> None:
    assert usual(calls("fed")) <= 68


def test_nor_is_one_in_which_two_optimizers_take_turns() -> None:
    assert usual(calls("turns")) <= 50
    assert statistics.mean(calls("turns")) <= 100


def test_a_larger_model_costs_hardly_more_calls() -> None:
    """What is done for each tensor is done in C."""
    small, large = calls(layers=8), calls(layers=24)
    tensors = 2 * 2 * (24 - 8)

    assert (usual(large) - usual(small)) / tensors <= 0.05
    assert (statistics.mean(large) - statistics.mean(small)) / tensors <= 0.1
