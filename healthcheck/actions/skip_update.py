"""Keep one bad update from reaching the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.actions.able import why_unable
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert


class SkipUpdate:
    """Keep the pending optimizer step from being applied; weights and optimizer state keep their bits.

    Works only while the update is still ahead: the rule must be judged before it, which the
    engine does for values that are on the host by then. Later it says so and does nothing.
    """

    name = "skip_update"
    stage = "mitigate"
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
