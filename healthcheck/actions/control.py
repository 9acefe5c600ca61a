"""Actions that change the run, each through the trainer's controls: stop, skip_update, scale_lr, checkpoint;
and the two that only mark an alert."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.errors import UsageError
from healthcheck.core.protocols import ActionContext, Controls


def why_unable(controls: Controls, control: str) -> str:
    """Empty if ``control`` (``skip_update``, ``checkpoint``, ...) exists here, else the adapter's reason."""
    capabilities = controls.capabilities
    if control in capabilities.controls:
        return ""
    return capabilities.gaps.get(control) or f"{capabilities.trainer} offers no {control.replace('_', ' ')}"


# --------------------------------------------------------------------------------------------------
# End the run: in the framework's own way, at a step boundary.


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
            words.append(f"{earlier} asked for it already")
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


# --------------------------------------------------------------------------------------------------
# Keep one bad update from reaching the weights.


class SkipUpdate:
    """Keep the pending optimizer step from being applied; weights and optimizer state keep their bits.

    Works only while the update is still ahead: the rule must be judged before it, which the
    engine does for values that are on the host by then. Later it says so and does nothing.
    """

    name = "skip_update"
    stage = "mitigate"
    per_update = True
    options_schema: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        reason = why_unable(context.controls, "skip_update")
        if reason:
            return ActionOutcome.nothing_done(self.name, reason)
        gated = getattr(context.controls, "gated", None)
        if gated is not None and gated(alert.fired_step, alert.rule):
            return ActionOutcome.of(
                self.name,
                f"held back the update of step {alert.fired_step:,}",
                skipped_step=alert.fired_step,
            )
        if not context.before_update or alert.fired_step != context.step:
            return ActionOutcome.nothing_done(
                self.name, f"the value came after the update of step {alert.fired_step:,}"
            )
        if not context.controls.skip_update():
            return ActionOutcome.nothing_done(self.name, "this optimizer cannot be gated here")
        return ActionOutcome.of(self.name, f"skipped the update of step {context.step:,}", skipped_step=context.step)


# --------------------------------------------------------------------------------------------------
# Lower (or raise) the learning rate of all parameter groups.


class ScaleLr:
    """Multiply every learning rate by ``factor``.

    A scheduler that computes rates from its own base values undoes this at its next step unless
    the adapter scales those as well; the adapter says which in its capabilities.
    """

    name = "scale_lr"
    stage = "mitigate"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "factor": {
                "type": "number",
                "minimum": 1e-6,
                "maximum": 100,
                "description": "Factor that each learning rate is multiplied by, e.g. 0.5; from 1e-6 to 100.",
            }
        },
        "required": ["factor"],
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        reason = why_unable(context.controls, "scale_lr")
        if reason:
            return ActionOutcome.nothing_done(self.name, reason)
        factor = float(context.options["factor"])
        rates = context.controls.scale_lr(factor)
        if not rates:
            return ActionOutcome.nothing_done(self.name, "no optimizer seen yet")
        shown = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        return ActionOutcome.of(self.name, f"multiplied the learning rate by {factor:g}, now {shown}", rates=rates)


# --------------------------------------------------------------------------------------------------
# Ask the trainer to save now.


class Checkpoint:
    """Save at the next safe point, in the trainer's own way. Never overwrites an earlier checkpoint."""

    name = "checkpoint"
    stage = "mitigate"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "path": {
                "type": "string",
                "minLength": 1,
                "maxLength": 200,
                # Rule files may come from anybody: relative, no step upwards, no drive, no control character.
                "pattern": r"^(?![/\\~])(?!.*(?:^|[/\\])\.\.(?:[/\\]|$))[^:\x00-\x1f\x7f]+$",
                "description": "Where in the record to save, for instance `before-spike`; default: the trainer decides.",
            }
        },
        "additionalProperties": False,
    }

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        given, record = context.options.get("path"), context.run_dir
        if given and record is None:
            return ActionOutcome.nothing_done(self.name, f"no checkpoint {given}: this run has no record to keep it in")
        text, path = save(context, record / given if given and record is not None else None)
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


# --------------------------------------------------------------------------------------------------
# The two actions that only mark an alert: reports decide how loudly to say it.


_NO_OPTIONS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Note:
    """Keep the alert in the record and the closing block; say nothing while training."""

    name = "note"
    stage = "observe"
    options_schema: Mapping[str, Any] = _NO_OPTIONS

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        return ActionOutcome.of(self.name, "noted")


class Warn:
    """Say the alert on the console when it happens, and keep it in the record."""

    name = "warn"
    stage = "observe"
    options_schema: Mapping[str, Any] = _NO_OPTIONS

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        return ActionOutcome.of(self.name, "warned")
