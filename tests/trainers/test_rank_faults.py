"""Faults of several ranks and healthy twins, as processes over gloo: some of the runs of ``benchmarks/rank_faults.py``, of which
hundreds were made by hand, and one job that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUNS = (
    "batchnorm:1", "accumulation:2", "no_sync sgd:1", "hsdp:1",
    "drift:1", "bit flip:1", "alternating:1", "state:3", "lr:2", "equal loader:1",
)  # fmt: skip


def script(name: str, *runs: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HEALTHCHECK")}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--jobs", "2", "--only", *runs],
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forks of a process that has torch imported")
def test_faults_of_ranks_are_named_by_their_cause_and_nothing_is_said_of_healthy_ones() -> None:
    done = script("rank_faults.py", *RUNS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RUNS)} runs, 0 not as wanted" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forks of a process that has torch imported")
def test_the_rank_that_others_wait_for_is_named_and_the_job_ends_with_the_code_that_was_asked_for() -> None:
    done = script("rank_hangs.py", "missing enter:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing enter:2: right" in done.stdout
    assert "{75: 1}" in done.stdout
