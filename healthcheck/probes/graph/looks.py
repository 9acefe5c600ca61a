"""At which backward passes a probe looks at the graph of the loss: at a few, and then it rests."""

from __future__ import annotations

from collections.abc import Sequence

from healthcheck.events import Event

PAUSE = 1000
"""Steps of a rest: of a probe that has looked, or of one in a run that shows no graph."""


class GraphLooks:
    """Counts backward passes.

    :param at: numbers of those that are looked at, from 1.
    """

    def __init__(self, at: Sequence[int]) -> None:
        self._at = frozenset(at)
        self._last = max(at)
        self._passes = 0
        self.rests_until = 0
        """For the probe: it need not be asked before this step."""

    def due(self, event: Event) -> bool:
        """Count one more backward pass; whether it is one of those that are looked at."""
        if event.loss_graph is None or self._passes > self._last:
            self.rests_until = event.step + PAUSE
            return False
        self._passes += 1
        return self._passes in self._at
