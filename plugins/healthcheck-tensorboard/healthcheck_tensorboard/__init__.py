"""Samples as scalars and alerts as text in TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Session, Setting, TrackedAlert, Tracker


class Plugin(Tracker):
    """Writes event files into the folder of ``tensorboard.dir``. Files of one folder are one run in TensorBoard: with the log
    folder of the script's own writer, both are shown together."""

    name = "tensorboard"

    def settings(self) -> Iterator[Setting]:
        schema = {"type": "string", "maxLength": 1000}
        yield Setting(
            "tensorboard.dir", "", "Folder of the event files; that of the script's writer joins its run.", schema
        )

    def open(self, session: Session) -> str:
        folder = str(session.settings.get("tensorboard.dir") or "")
        if not folder:
            return ""
        # The writer of the tensorboard package, with torch's as a thin layer over it: its own thread writes.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, filename_suffix=".healthcheck")
        return folder

    def log(self, rows: Any) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def alert(self, alert: TrackedAlert) -> None:
        lines = "  \n".join(alert.text.splitlines())
        self._writer.add_text(f"{self.prefix}alerts", f"**{alert.severity}: {alert.title}**  \n{lines}", alert.step)

    def artifact(self, alert: TrackedAlert, folder: Path) -> None:
        """TensorBoard keeps no files: it shows where they are."""
        self._writer.add_text(f"{self.prefix}evidence", f"{alert.title}: `{folder}`", alert.step)

    def end(self, report: Mapping[str, Any]) -> None:
        said = {key: report.get(key) for key in ("verdict", "exit_code", "exit_words", "steps")}
        self._writer.add_text(f"{self.prefix}verdict", f"`{json.dumps(said)}`", int(report.get("steps") or 0))
        self._writer.close()
