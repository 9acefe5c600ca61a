"""Ask the trainer to save now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck.actions.able import why_unable
from healthcheck.errors import UsageError
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert


class Checkpoint:
    """Save at the next safe point, in the trainer's own way. Never overwrites an earlier checkpoint."""

    name = "checkpoint"
    stage = "mitigate"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "minLength": 1, "description": "Where to save; default: the trainer decides."}
        },
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        given = context.options.get("path")
        text, path = save(context, Path(given) if given else None)
        if path is None:
            return ActionOutcome.nothing_done(self.name, text)
        return ActionOutcome.of(self.name, text, path=path)


def save(context: ActionContext, path: Path | None = None) -> tuple[str, str | None]:
    """``(words, where)``; ``where`` is None if nothing will be saved, and the words say why."""
    reason = why_unable(context.controls, "checkpoint")
    if reason:
        return reason, None
    try:
        where = context.controls.request_checkpoint(path)
    except UsageError as error:
        return str(error), None
    return f"asked for a checkpoint: {where}", where
