"""A run that goes on in a process of its own, for the commands that look at one or talk to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE = 120.0
SESSIONS = Path(__file__).resolve().parents[1] / "unit" / "reports" / "sessions.py"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; returns where records go."""
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


class LiveRun(subprocess.Popen[bytes]):
    """A run in another process, which goes on until it is told to end."""

    def __init__(self, loss: list[float | str], pause: float, over: Path) -> None:
        self.over = over
        spec = json.dumps({"series": {"loss": loss}, "pause": pause, "until": str(over)})
        super().__init__([sys.executable, str(SESSIONS), spec], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self) -> int:
        """Have it end as after its last step; returns its exit code."""
        self.over.touch()
        return self.wait(PATIENCE)


@pytest.fixture
def going_on(here: Path, wait_until: Callable[..., None]) -> Iterator[Callable[..., LiveRun]]:
    """``going_on([2.0], 0.02)``: these losses over and over, one in so many seconds; returns once some are recorded."""
    started: list[LiveRun] = []

    def start(loss: list[float | str], pause: float) -> LiveRun:
        started.append(LiveRun(loss, pause, here.parent / "over"))
        wait_until(lambda: any(file.stat().st_size for file in here.glob("*/samples.jsonl")), "a record of the run")
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
