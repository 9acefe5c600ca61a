"""How many optimizers train: one loss of several means something else than the loss of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Metric, Sample

MOST = 64
"""Optimizers told apart; inner loops make them by the thousand."""
LOOK_EVERY = 10
"""Steps between two looks at one and the same optimizer."""
"""Optimizers told apart; inner loops make them by the thousand."""


class OptimizerCountProbe:
    """Counts optimizers of different parameters, as they make updates.

    The two of a GAN are two from the first step on, and so are those of two folds or two trials in one script; a new
    optimizer for the same parameters (a second stage) is none.
    """

    name = "optimizer-count"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("optimizers", "Optimizers of different parameters that have made an update so far."),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._seen: list[Callable[[], Any]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None:
            return ()
        first = next((p for group in event.optimizer.param_groups for p in group["params"]), None)
        if len(self._seen) < MOST and not any(known() is first for known in self._seen):
            self._seen.append(weak(first))
        self.rests_until = event.step + LOOK_EVERY
        return (Sample("optimizers", event.step, float(len(self._seen))),)
