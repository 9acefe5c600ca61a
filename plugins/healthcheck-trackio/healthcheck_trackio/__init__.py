"""Samples, alerts and evidence in a run of Trackio."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Session, Setting, TrackedAlert, Tracker

LEVELS = {"info": "INFO", "warning": "WARN", "error": "ERROR"}


class Plugin(Tracker):
    """Joins the run that the script has open; with ``trackio.project`` it begins one where there is none.

    In a joined run, samples are system metrics, with the step in ``healthcheck/step``: metrics proper would move the script's
    step counter.
    """

    name = "trackio"

    def settings(self) -> Iterator[Setting]:
        schema = {"type": "string", "maxLength": 128}
        yield Setting("trackio.project", "", "Project in which a run is begun where the script has none open.", schema)

    def open(self, session: Session) -> str:
        # The open run is kept for each thread: it is looked up here, in that of the training.
        variables = sys.modules.get("trackio.context_vars")
        self.run = variables.current_run.get() if variables is not None else None
        self.own = self.run is None
        if not self.own:
            return "the run that the script has open"
        project = str(session.settings.get("trackio.project") or "")
        if not project:
            return ""
        import trackio

        self.run = trackio.init(project=project, embed=False)
        trackio.context_vars.current_run.set(None)  # what the script logs later must not land in this one
        return f"a run of its own in project {project}"

    def log(self, rows: Any) -> None:
        for step, values in rows:
            if self.own:
                self.run.log(dict(values), step=step)
            else:
                self.run.log_system({**values, f"{self.prefix}step": step})

    def alert(self, alert: TrackedAlert) -> None:
        from trackio import AlertLevel

        self.run.alert(alert.title, alert.text, getattr(AlertLevel, LEVELS[alert.severity]), step=alert.step)

    def artifact(self, alert: TrackedAlert, folder: Path) -> None:
        self.run.log_artifact(str(folder), name=f"healthcheck-evidence-{alert.number}", type="healthcheck-evidence")

    def end(self, report: Mapping[str, Any]) -> None:
        if self.own:
            self.run.finish()
