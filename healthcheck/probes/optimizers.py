"""How many optimizers train: one loss of several means something else than the loss of a run."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample


class OptimizerCountProbe:
    """Counts optimizers by their index, as they make updates. The two of a GAN are two from the first step on."""

    name = "optimizer-count"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (Metric("optimizers", "Optimizers that have made an update so far."),)

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self._seen.add(event.optimizer_index)
        return (Sample("optimizers", event.step, float(len(self._seen))),)
