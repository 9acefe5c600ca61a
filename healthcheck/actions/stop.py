"""End the run: in the framework's own way, at a step boundary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.actions.able import why_unable
from healthcheck.actions.checkpoint import save
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert


class Stop:
    """Ask for the end of the run; the first stop of a run is the cause, later ones are listed with it.

    Judged before the update, it keeps that update from being applied as well, so that the weights
    stay those of the step before. ``mode: abort`` also ends a process that hangs, where nobody is
    at the keyboard. ``exit_code`` replaces the status 1, for schedulers that read it.
    """

    name = "stop"
    stage = "stop"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "mode": {
                "enum": ["graceful", "abort"],
                "description": "graceful: at the next step boundary. abort: also when the main thread hangs.",
            },
            "exit_code": {"type": "integer", "minimum": 1, "maximum": 255, "description": "Exit status instead of 1."},
            "checkpoint": {"type": "boolean", "description": "Save before stopping, where the trainer can."},
        },
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        reason = why_unable(context.controls, "stop")
        if reason:
            return ActionOutcome.nothing_done(self.name, reason)
        words = [f"stop at step {context.step:,}"]
        data: dict[str, Any] = {"mode": context.options.get("mode", "graceful")}
        if context.before_update:
            data["update_skipped"] = not why_unable(context.controls, "skip_update") and context.controls.skip_update()
            words.append("update skipped" if data["update_skipped"] else _not_skipped(context))
        if context.options.get("checkpoint"):
            text, where = save(context)
            words.append(text if where is not None else f"no checkpoint: {text}")
            if where is not None:
                data["checkpoint"] = where
        earlier: str = getattr(getattr(context.controls, "stop", None), "rule", "")
        if earlier and earlier != alert.rule:
            words.append(f"{earlier} had asked already")
        context.controls.request_stop(
            alert.message or alert.rule,
            rule=alert.rule,
            step=context.step,
            mode=data["mode"],
            exit_code=int(context.options.get("exit_code", 1)),
        )
        return ActionOutcome.of(self.name, "; ".join(words), **data)


def _not_skipped(context: ActionContext) -> str:
    """Why: ranks that see different values must not skip one by one, but gradients are the same on all of them."""
    if getattr(context.controls, "may_skip", True):
        return "the update could not be skipped"
    return "the rules on gradients, which all ranks share, decide on the update"
