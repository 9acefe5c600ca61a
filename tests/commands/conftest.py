"""A run that goes on in a process of its own, for the commands that look at one or talk to it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SESSIONS = Path(__file__).resolve().parents[1] / "unit" / "reports" / "sessions.py"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; returns where records go."""
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def going_on(here: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``going_on([2.0] * 2000, 0.02)``: a loss every so many seconds; returns once the run has a record."""
    started: list[subprocess.Popen[bytes]] = []

    def start(loss: list[float | str], pause: float) -> subprocess.Popen[bytes]:
        spec = json.dumps({"series": {"loss": loss}, "pause": pause})
        command = [sys.executable, str(SESSIONS), spec]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 60
        while not list(here.glob("*/samples.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
