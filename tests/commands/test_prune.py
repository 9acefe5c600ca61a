"""``healthcheck prune``: old records go, those that may go on and folders that are none stay."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from healthcheck.cli import main


def record(here: Path, name: str, *, days: float = 0, verdict: str = "ok", pid: int = 0) -> Path:
    """A run of so many days ago; without a verdict it has no report."""
    folder = here / name
    folder.mkdir(parents=True)
    began = datetime.now(timezone.utc) - timedelta(days=days)
    facts = {"started": began.isoformat(), "host": socket.gethostname(), "pid": pid, "target": "train.py"}
    (folder / "run.json").write_text(json.dumps(facts))
    if verdict:
        (folder / "report.json").write_text(json.dumps({"verdict": verdict, "steps": 3}))
    for path in folder.iterdir():
        os.utime(path, (time.time() - days * 86_400,) * 2)
    return folder


def left(here: Path) -> list[str]:
    return sorted(path.name for path in here.iterdir() if path.is_dir() and not path.is_symlink())


def test_the_newest_are_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in range(5):
        record(here, f"run-{day}", days=5 - day)
    assert main(["prune", "--keep", "2", "--list"]) == 0
    assert "would delete 3 runs" in capsys.readouterr().out
    assert len(left(here)) == 5
    assert main(["prune", "--keep", "2"]) == 0
    assert "deleted 3 runs" in capsys.readouterr().out
    assert left(here) == ["run-3", "run-4"]


def test_by_age_and_by_verdict(here: Path) -> None:
    record(here, "old-bad", days=40, verdict="failed")
    record(here, "old-good", days=40)
    record(here, "new", days=1)
    assert main(["prune", "--older", "30d", "--healthy"]) == 0
    assert left(here) == ["new", "old-bad"]
    assert main(["prune", "--older", "30d"]) == 0
    assert left(here) == ["new"]


def test_a_run_that_goes_on_and_a_folder_of_somebody_else_stay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(here, "running", verdict="", pid=os.getpid())
    record(here, "killed-just-now", verdict="")
    (here / "notes").mkdir()
    (here / "latest").symlink_to("gone")
    record(here, "gone", days=2)
    os.utime(here / "gone" / "run.json", (0, 0))
    assert main(["prune", "--keep", "0"]) == 0
    assert left(here) == ["killed-just-now", "notes", "running"]
    assert "kept, because they may still be running" in capsys.readouterr().out
    assert os.readlink(here / "latest") != "gone"


def test_it_wants_to_be_told_what_may_go(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune"]) == 4
    assert "--keep 50, --older 30d" in capsys.readouterr().err
    assert main(["prune", "--keep", "3"]) == 4
    assert "there is no folder" in capsys.readouterr().err
    here.mkdir()
    assert main(["prune", "--older", "3 fortnights"]) == 4
    assert '--older "3 fortnights"' in capsys.readouterr().err
