from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def sessions(helper: Callable[[str], ModuleType]) -> ModuleType:
    """The helpers of ``sessions.py``."""
    return helper("tests/unit/reports/sessions.py")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records of this test go."""
    for name in [n for n in os.environ if n.startswith("HEALTHCHECK")] + [
        "RANK",
        "WORLD_SIZE",
        "NO_COLOR",
        "FORCE_COLOR",
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def watched(
    runs: Path, sessions: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    """``watched(series=..., settings=..., env=...)``: one session here, with what it printed."""

    def start(env: dict[str, str] | None = None, **spec: Any) -> Ended:
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        report = sessions.run(**spec)
        out, err = capfd.readouterr()
        return Ended(report["exit_code"], out, err)

    return start


@pytest.fixture
def process(runs: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``process(series=..., pause=...)``: one session in a process of its own, just started."""

    started: list[subprocess.Popen[bytes]] = []

    def start(**spec: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "sessions.py"), json.dumps(spec)]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
