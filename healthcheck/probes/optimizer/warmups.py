"""Warm-ups that begin again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.optimizer.learning_rate import largest_rate
from healthcheck.probes.values import on_host
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Metric, Sample

LOW = 1 / 3
"""Part of a warm-up's goal at which it begins, at the most."""
CLIMB = 3
"""Updates, at the least, over which a warm-up rises."""


class WarmupProbe:
    """Counts how often the rate of the first optimizer fell back, in one step, to where its warm-up began.

    Only falls from the highest rate since the warm-up's beginning, over at least three rising updates: a schedule that
    restarts or goes in cycles has come down before it begins again. Counting ends with the optimizer.
    """

    name = "warm-ups"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "lr.warmups", "How often the learning rate fell from its peak to where its warm-up began, at one stroke."
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._begin(0.0)

    def _begin(self, rate: float) -> None:
        self._start = self._rate = rate
        self._rises = self._again = 0
        self._fell = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if optimizer is None or event.optimizer_index > 0:
            return ()
        rate = largest_rate(optimizer)
        if rate is None or not on_host(rate):
            return ()
        if self._optimizer() is not optimizer:
            self._optimizer = weak(optimizer)
            self._begin(rate)
            return ()
        before, self._rate = self._rate, rate
        if rate > before:
            self._rises += 1
            return ()
        if rate == before:
            return ()
        again = rate <= LOW * before and abs(rate - self._start) <= 0.01 * self._start
        if again and self._rises >= CLIMB and not self._fell:
            self._again += 1
        else:
            self._fell = True
        if again:
            self._rises, self._fell = 0, False
        return (Sample("lr.warmups", event.step, float(self._again)),)
