"""Samples, alerts and evidence in a run of Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Session, Setting, TrackedAlert, Tracker

LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


class Plugin(Tracker):
    """Joins the run that the script has open; with ``wandb.project`` it begins one where there is none.

    In a joined run, samples are put into the rows that the script logs (``commit=False``), with the step in
    ``healthcheck/step``: rows of our own would move the script's step counter and have its next ones refused.
    """

    name = "wandb"

    def settings(self) -> Iterator[Setting]:
        schema = {"type": "string", "maxLength": 128}
        yield Setting("wandb.project", "", "Project in which a run is begun where the script has none open.", schema)

    def open(self, session: Session) -> str:
        self.own = False
        self.run = getattr(sys.modules.get("wandb"), "run", None)
        if self.run is not None:
            for pattern in (f"{self.prefix}*",):
                self.run.define_metric(pattern, step_metric=f"{self.prefix}step")
            return "the run that the script has open"
        project = str(session.settings.get("wandb.project") or "")
        if not project:
            return ""
        import wandb

        # Nothing of the machine, the command line or the code is uploaded for a run that the script did not ask for.
        quiet = wandb.Settings(
            console="off", save_code=False, disable_git=True, x_disable_meta=True, x_disable_stats=True, silent=True
        )
        self.run = wandb.init(project=project, settings=quiet)
        self.own = True
        return f"a run of its own in project {project}"

    def log(self, rows: Any) -> None:
        for step, values in rows:
            if self.own:
                self.run.log(dict(values), step=step)
            else:
                self.run.log({**values, f"{self.prefix}step": step}, commit=False)

    def alert(self, alert: TrackedAlert) -> None:
        import wandb

        level = getattr(wandb.AlertLevel, LEVELS[alert.severity])
        self.run.alert(title=alert.title, text=alert.text, level=level, wait_duration=0)
        tag = f"healthcheck:{alert.rule}"[:64]
        if tag not in (self.run.tags or ()):
            self.run.tags = (*(self.run.tags or ()), tag)
        self.run.summary[f"{self.prefix}alerts/{alert.number}"] = f"{alert.severity}: {alert.title}: {alert.text}"

    def artifact(self, alert: TrackedAlert, folder: Path) -> None:
        import wandb

        bundle = wandb.Artifact(f"healthcheck-evidence-{self.run.id}-{alert.number}", type="healthcheck-evidence")
        bundle.add_dir(str(folder))
        self.run.log_artifact(bundle)

    def end(self, report: Mapping[str, Any]) -> None:
        for key in ("verdict", "exit_code"):
            self.run.summary[f"{self.prefix}{key}"] = report.get(key)
        if self.own:
            self.run.finish(exit_code=int(report.get("exit_code") or 0))
