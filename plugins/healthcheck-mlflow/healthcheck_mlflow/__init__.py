"""Samples, alerts and evidence in a run of MLflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Session, Setting, TrackedAlert, Tracker

MOST = 900
"""Metrics of one request: a tracking server takes at most 1,000."""


class Plugin(Tracker):
    """Joins the run that the script has open; with ``mlflow.experiment`` it begins one where there is none.

    It speaks to the tracking store of the script through a client, which has no "active run": what the script logs after it
    goes where it went before.
    """

    name = "mlflow"

    def settings(self) -> Iterator[Setting]:
        schema = {"type": "string", "maxLength": 256}
        yield Setting(
            "mlflow.experiment", "", "Experiment in which a run is begun where the script has none open.", schema
        )

    def open(self, session: Session) -> str:
        module = sys.modules.get("mlflow")
        active = module.active_run() if module is not None else None
        experiment = str(session.settings.get("mlflow.experiment") or "")
        if active is None and not experiment:
            return ""
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient()
        self.own = active is None
        if active is not None:
            self.run = str(active.info.run_id)
            return "the run that the script has open"
        known = self.client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self.client.create_experiment(experiment)
        self.run = str(self.client.create_run(number, run_name=session.info.target).info.run_id)
        return f"a run of its own in experiment {experiment}"

    def log(self, rows: Any) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for step, values in rows for name, value in values.items()]
        for begin in range(0, len(metrics), MOST):
            self.client.log_batch(self.run, metrics=metrics[begin : begin + MOST])

    def alert(self, alert: TrackedAlert) -> None:
        self.client.set_tag(
            self.run, f"healthcheck.alert.{alert.number}", f"{alert.severity}: {alert.title}\n{alert.text}"
        )

    def artifact(self, alert: TrackedAlert, folder: Path) -> None:
        self.client.log_artifacts(self.run, str(folder), f"healthcheck/evidence-{alert.number}")

    def end(self, report: Mapping[str, Any]) -> None:
        self.client.set_tag(self.run, "healthcheck.verdict", str(report.get("verdict")))
        self.client.log_dict(self.run, dict(report), "healthcheck/report.json")
        if self.own:
            self.client.set_terminated(self.run, "FAILED" if report.get("exit_code") else "FINISHED")
