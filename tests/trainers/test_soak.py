"""Ranks out of step, as processes: ten of the runs of ``benchmarks/soak.py``, of which two hundred were made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
RUNS = {
    "healthy, a collective every step": 14,
    "healthy, local SGD, four ranks": 64,
    "a NaN, a collective every step": 13,
    "a NaN, local SGD, four ranks": 5,
    "a NaN, four ranks that make different numbers of steps": 11,
    "a NaN, and a rank that dies": 155,
    "a rank that dies, local SGD": 12,
    "a NaN, and a rank that nobody watches": 49,
    "a NaN, and a rank 0 that nobody watches": 340,
    "a rank 0 that nobody watches, local SGD, four ranks": 259,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forks of a process that has torch imported")
def test_all_ranks_stop_together_or_all_only_report_and_nobody_vouches_for_a_rank_that_is_not_seen() -> None:
    """How long a step took is not judged here: on a busy machine that says something of the machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHCHECK")}
    seeds = [str(seed) for seed in RUNS.values()]
    done = subprocess.run(
        [sys.executable, str(SOAK), "--jobs", "2", "--stall", "60", "--only", *seeds],
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RUNS)} runs, 0 wrong" in done.stdout
