"""No telemetry, no update check: the README says so in one sentence, and this is its proof."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"

GUARD = """
import os, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{event} {arguments!r}\\n")
        raise OSError(f"{event} is refused in this test")

sys.addaudithook(refuse)
"""


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python processes cannot reach a network and write down every attempt."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(GUARD)
    return {"PYTHONPATH": str(site), "NETWORK_LOG": str(tmp_path / "network.log")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("run", SCRIPT, "--nan-at", "20"), ("plan",), ("metrics",), ("plugins",), ("doctor",)],
    ids=lambda args: " ".join(str(a) for a in args if a is not SCRIPT),
)
def test_a_command_opens_no_connection(
    healthcheck_command: Callable[..., Any], guarded: dict[str, str], tmp_path: Path, args: tuple[object, ...]
) -> None:
    result = healthcheck_command(*args, env=guarded)
    assert not (tmp_path / "network.log").exists(), (tmp_path / "network.log").read_text()
    assert result.returncode in (0, 1), result.stderr


@pytest.mark.slow
def test_the_guard_sees_an_attempt(guarded: dict[str, str], tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **guarded}, capture_output=True, text=True)
    assert result.returncode != 0
    assert "socket." in (tmp_path / "network.log").read_text()
