"""The two actions that only mark an alert: reports decide how loudly to say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.protocols import ActionContext

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
