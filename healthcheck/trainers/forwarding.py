"""Alerts for a framework's own logger: each once, under its rule's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthcheck.verdicts import Alert


class Forwarded:
    """Remembers how many of a run's alerts have been handed on."""

    def __init__(self, alerts: Sequence[Alert] = ()) -> None:
        self._count = len(alerts)

    def news(self, alerts: Sequence[Alert]) -> dict[str, float]:
        """``{"alert/loss-spike": 1.0}`` for those that came since the last call."""
        new = alerts[self._count :]
        self._count = len(alerts)
        return {f"alert/{alert.rule}": 1.0 for alert in new}
