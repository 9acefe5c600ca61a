"""An action: touch a file that something outside the run waits for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck import ActionContext, ActionOutcome, Alert


class Touch:
    """Create or touch a file: the simplest message to a cron job, a sidecar or a shell loop."""

    name = "healthcheck_example.touch"
    stage = "observe"  # it changes nothing about the training, so it also runs under --observe
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"path": {"type": "string", "minLength": 1, "description": "File to touch."}},
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        given = context.options.get("path")
        if given is None and context.run_dir is None:
            return ActionOutcome.nothing_done(self.name, "no path given, and this run keeps no record")
        path = Path(given) if given is not None else Path(str(context.run_dir)) / "touched"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return ActionOutcome.of(self.name, f"touched {path}", path=str(path))
