"""``healthcheck runs`` over an index that any process may lose, and two runs side by side."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.record import runs as index
from healthcheck.record.runs import Run, all_runs


def run(folder: Path, name: str, *, verdict: str = "ok", loss: float = 1.0, **facts: Any) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    told = {"name": name, "target": f"{name}.py", "started": "2026-01-01T00:00:00+00:00", "world_size": 1, **facts}
    (made / "run.json").write_text(json.dumps(told))
    rules = {"spike": {"verdict": verdict, "samples": 1, "threshold": "above 8"}}
    report = {"verdict": verdict, "exit_code": 0, "steps": 2, "seconds": 1.0, "alerts": [], "rules": rules}
    (made / "report.json").write_text(json.dumps(report))
    (made / "samples.jsonl").write_text(json.dumps({"step": 2, "t": 1.0, "p": "train", "m": {"loss": loss}}) + "\n")
    return made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):
        run(tmp_path / "runs", name)
    return tmp_path / "runs"


def asked(folder: Path) -> list[str]:
    """The runs that had to be read for a list of all."""
    seen: list[str] = []

    def summarise(one: Run) -> dict[str, Any]:
        seen.append(one.name)
        return {"name": one.name, "steps": one.steps}

    rows = index.summaries(folder, all_runs(folder), summarise)
    assert [row["name"] for row in rows] == [one.name for one in all_runs(folder)]
    return seen


def test_a_finished_run_is_read_once_and_again_when_it_changes(here: Path) -> None:
    assert sorted(asked(here)) == ["one", "three", "two"]
    assert asked(here) == []
    (here / "two" / "report.json").write_text(json.dumps({"verdict": "failed", "steps": 3}))
    assert asked(here) == ["two"]
    assert asked(here) == []


def test_a_run_without_a_report_is_always_read_and_one_that_is_gone_is_forgotten(here: Path) -> None:
    (here / "one" / "report.json").unlink()
    asked(here)
    assert asked(here) == ["one"]
    for path in sorted((here / "two").iterdir()):
        path.unlink()
    (here / "two").rmdir()
    asked(here)
    with sqlite3.connect(here / index.INDEX) as base:
        assert [name for (name,) in base.execute("SELECT name FROM runs")] == ["three"]


@pytest.mark.parametrize("content", [b"", b"not a database, certainly not one of ours", None])
def test_an_index_that_is_lost_or_damaged_is_made_again(here: Path, content: bytes | None) -> None:
    asked(here)
    if content is None:
        (here / index.INDEX).unlink()
    else:
        (here / index.INDEX).write_bytes(content)
    assert len(asked(here)) == 3
    assert asked(here) == []


def test_an_index_of_another_version_is_made_again(here: Path) -> None:
    asked(here)
    with sqlite3.connect(here / index.INDEX) as base:
        base.execute("PRAGMA user_version = 99")
    assert len(asked(here)) == 3
    assert asked(here) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_listed_all_the_same(here: Path) -> None:
    here.chmod(0o500)
    try:
        assert len(asked(here)) == 3
    finally:
        here.chmod(0o700)


def test_the_command_lists_the_same_with_and_without_the_index(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    first = capsys.readouterr().out
    assert (here / index.INDEX).is_file()
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == first
    assert "three.py" in first


def test_two_runs_are_compared_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(here, "other", verdict="failed", loss=float("2.5"), argv=["other.py", "--lr", "3"], versions={"torch": "9"})
    assert main(["runs", "--compare", "one", "other"]) == 0
    out = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in out.splitlines())}
    assert rows["last loss"] == ["1", "2.50"]
    assert rows["rule spike"] == ["ok", "failed"]
    assert rows["torch version"] == ["-", "9"]
    assert "steps" not in rows  # they are the same
    assert main(["runs", "--compare", "one", "other", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["loss"] == [1.0, 2.5]
