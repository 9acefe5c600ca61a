"""What every test may use: the console command as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# The console command without depending on where pip put it: the same entry point.
COMMAND = (sys.executable, "-c", "import sys; from healthcheck.commands import main; sys.exit(main())")


@pytest.fixture
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture
def healthcheck_command(tmp_path: Path) -> Run:
    """``healthcheck_command("run", "train.py", cwd=..., env=...)``: exit code and both streams of a real process.

    Records go to ``tmp_path/runs``; the working directory is ``tmp_path`` unless ``cwd`` is given.
    Variables of ours that the developer has set do not reach the process.
    """
    script = Path(sys.executable).with_name("healthcheck")
    head = (str(script),) if script.exists() else COMMAND

    def run(
        *args: object, cwd: Path = tmp_path, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
        clean |= {"HEALTHCHECK_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1", **(env or {})}
        return subprocess.run(
            [*head, *map(str, args)],
            cwd=cwd,
            env=clean,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run
