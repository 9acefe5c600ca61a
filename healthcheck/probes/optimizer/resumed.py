"""Optimizers that go on in the middle of a run without what they had learnt before."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from healthcheck.events import Event, EventKind
from healthcheck.probes.optimizer.rebuilt import has_memory
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample


class ResumedOptimizerProbe:
    """Looks once, at the first update of a run that does not begin at step 1, for moments and momentum.

    A run begins with its first backward pass: some may come before the first update, as those of an attack on the inputs.
    Optimizers that come later are another matter: a second stage, a further ``fit()``, another side of a game.
    """

    name = "resumed-optimizer"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.state_lost",
            "1 if a run goes on at a later step and its optimizer has no state, else 0.",
            needs=("a resume",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looked = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if self._looked or (optimizer is None and event.step > 1):
            return ()
        self._looked, self.rests_until = True, sys.maxsize
        if event.step <= 1 or not hasattr(optimizer, "defaults"):
            return ()
        lost = has_memory(optimizer) and not optimizer.state
        return (Sample("optimizer.state_lost", event.step, float(lost)),)
