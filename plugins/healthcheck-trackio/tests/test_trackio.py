"""A local project of Trackio, read back by its own storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trackio", reason="trackio is not installed: `make outward` has it")

import trackio
from healthcheck.testing import check_plugin, play
from trackio.sqlite_storage import SQLiteStorage

from healthcheck_trackio import Plugin

NAME = "trackio"
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


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, NAME) == []


@pytest.mark.slow
def test_it_joins_the_run_of_the_script_and_leaves_its_steps_alone(local: str, tmp_path: Path) -> None:
    project = f"joined-{tmp_path.name}"
    run = trackio.init(project=project, name="r", embed=False)
    trackio.log({"own": 1.0})
    report = play(RULES, {"loss": "3, 2, nan"}, plugins=[local]).report
    trackio.log({"own": 2.0})
    trackio.finish()
    assert report["trackio"]["undelivered"] == []
    logged = SQLiteStorage.get_logs(project, run.name)
    assert [(row["step"], row["own"]) for row in logged if "own" in row] == [(0, 1.0), (1, 2.0)]
    system = SQLiteStorage.get_system_logs(project, run.name)
    assert [row["healthcheck/loss"] for row in system if "healthcheck/loss" in row][:2] == [3.0, 2.0]
    [alert] = SQLiteStorage.get_alerts(project)
    assert alert["title"] == "nan at step 3"


@pytest.mark.slow
def test_with_a_project_it_begins_a_run_of_its_own(local: str, tmp_path: Path) -> None:
    project = f"own-{tmp_path.name}"
    play({**RULES, "settings": {"trackio.project": project}}, {"loss": "3, 2, 1.5"}, plugins=[local])
    [name] = SQLiteStorage.get_runs(project)
    logged = SQLiteStorage.get_logs(project, name)
    assert [row["healthcheck/loss"] for row in logged if "healthcheck/loss" in row] == [3.0, 2.0, 1.5]


def test_without_a_run_and_a_project_nothing_happens(local: str) -> None:
    assert "trackio" not in play(RULES, {"loss": "1, nan"}, plugins=[local]).report
