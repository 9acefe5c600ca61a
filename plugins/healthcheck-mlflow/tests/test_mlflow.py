"""A local store of MLflow, read back by MLflow's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="mlflow is not installed: `make outward` has mlflow-skinny")

import mlflow
from healthcheck.testing import check_plugin, play

from healthcheck_mlflow import Plugin

NAME = "mlflow"
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
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # the store that needs no database is in maintenance since MLflow 3.13
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(Plugin, NAME) == []


def test_it_joins_the_run_of_the_script_and_leaves_it_open(local: str) -> None:
    with mlflow.start_run() as run:
        mlflow.log_metric("own", 1.0, step=1)
        report = play(RULES, {"loss": "3, 2, nan", "grad_norm[head.weight]": "1 x3"}, plugins=[local]).report
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert report["mlflow"]["undelivered"] == []
    client = mlflow.MlflowClient()
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "healthcheck/loss")][:2] == [
        (1, 3.0),
        (2, 2.0),
    ]
    found = client.get_run(run.info.run_id)
    assert found.data.tags["healthcheck.verdict"] == "failed"
    assert found.data.tags["healthcheck.alert.1"].startswith("error: nan at step 3\n")
    assert found.info.status == "FINISHED"
    assert not any("head" in name for name in found.data.metrics)
    assert [f.path for f in client.list_artifacts(run.info.run_id, "healthcheck")] == ["healthcheck/report.json"]


def test_with_an_experiment_it_begins_a_run_of_its_own(local: str) -> None:
    rules = {**RULES, "settings": {"mlflow.experiment": "mine"}}
    play(rules, {"loss": "3, 2, nan"}, plugins=[local])
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.status, run.data.tags["healthcheck.verdict"]) == ("FAILED", "failed")


def test_evidence_of_an_alert_is_an_artifact(local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    rules = {"version": 1, "rules": {"nan": {"metric": "loss", "when": "nonfinite", "then": ["evidence"]}}}
    with mlflow.start_run() as run:
        report = play(rules, {"loss": "3, 2, nan"}, plugins=[local], record=True).report
    assert [action["done"] for action in report["alerts"][0]["actions"]] == [True]
    kept = mlflow.MlflowClient().list_artifacts(run.info.run_id, "healthcheck/evidence-1")
    assert any(file.path.endswith(".json") for file in kept), kept


def test_without_a_run_and_an_experiment_nothing_happens(local: str) -> None:
    assert "mlflow" not in play(RULES, {"loss": "1, nan"}, plugins=[local]).report
