"""Offline runs of Weights & Biases, read back with the protobufs of its own package (which has no reader in Python any more)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: `make outward` has it")

import wandb
from healthcheck.testing import check_plugin, play
from wandb.proto import wandb_internal_pb2

from healthcheck_wandb import Plugin

NAME = "wandb"
RULES: dict[str, Any] = {
    "version": 1,
    "rules": {"nan": {"metric": "loss", "when": "nonfinite", "severity": "error", "hint": "lower the learning rate"}},
}


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plugin as a local file: the same whether its distribution is installed or not."""
    monkeypatch.setenv("HEALTHCHECK_DISABLE_PLUGINS", NAME)
    path = tmp_path / f"{NAME}_.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        f"from healthcheck_{NAME} import Plugin\n_plugin = Plugin()\n"
        + "".join(f"{name} = _plugin.{name}\n" for name in dir(Plugin) if name.startswith("healthcheck_"))
    )
    return str(path)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "f00d" * 10)
    yield
    wandb.teardown()  # it reads the environment once for a process


BLOCK = 32768


def records(folder: Path) -> list[Any]:
    """Everything up to the record of its end, which wandb's own process may write a little later."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        found = written(folder)
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    raise AssertionError("the run was not written to its end")


def written(folder: Path) -> list[Any]:
    """The file is a log of LevelDB: blocks of 32 KiB, each record in one piece or several, behind a header of seven bytes."""
    [path] = folder.rglob("*.wandb")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    assert b"f00df00d" not in data
    found, position, parts = [], 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def rows(found: list[Any]) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, NAME) == []


@pytest.mark.slow
def test_it_joins_the_run_of_the_script_and_leaves_its_steps_alone(local: str, tmp_path: Path) -> None:
    run = wandb.init(project="p")
    run.log({"own": 1.0}, step=0)
    report = play(RULES, {"loss": "3, 2, nan"}, plugins=[local]).report
    run.log({"own": 2.0}, step=1)
    run.log({"own": 3.0}, step=2)
    run.finish()
    assert report["wandb"]["where"] == "the run that the script has open"
    assert report["wandb"]["undelivered"] == []
    found = records(tmp_path)
    logged = rows(found)
    assert [row["own"] for row in logged if "own" in row] == [1.0, 2.0, 3.0]
    assert any(row.get("healthcheck/loss") is not None for row in logged)
    [alert] = [record.alert for record in found if record.WhichOneof("record_type") == "alert"]
    assert alert.title == "nan at step 3"
    assert "lower the learning rate" in alert.text


@pytest.mark.slow
def test_with_a_project_it_begins_a_run_of_its_own(local: str, tmp_path: Path) -> None:
    rules = {**RULES, "settings": {"wandb.project": "mine"}}
    report = play(rules, {"loss": "3, 2, 1.5"}, plugins=[local]).report
    assert (report["wandb"]["where"], report["wandb"]["problem"]) == ("a run of its own in project mine", "")
    logged = rows(records(tmp_path))
    assert [row["healthcheck/loss"] for row in logged if "healthcheck/loss" in row] == [3.0, 2.0, 1.5]


def test_without_a_run_and_a_project_nothing_happens(local: str, tmp_path: Path) -> None:
    assert "wandb" not in play(RULES, {"loss": "1, nan"}, plugins=[local]).report
