"""Lower (or raise) the learning rate of all parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.actions.able import why_unable
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert


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
                "exclusiveMinimum": 0,
                "description": "What each learning rate is multiplied with, e.g. 0.5.",
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
