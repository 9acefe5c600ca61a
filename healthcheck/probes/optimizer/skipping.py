"""Updates that a rule held back."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from healthcheck.events import Event, EventKind
from healthcheck.probes.transfer.late import Late
from healthcheck.probes.values import on_host, optimizer_labels
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


class SkippedUpdateProbe:
    """Counts updates that were kept from the weights. Gives nothing where no rule may do that."""

    name = "skipped-updates"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.skipped",
            "1 if a rule kept this update from being applied, else 0.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
        Metric(
            "updates.skipped_streak",
            "Updates in a row that rules kept from being applied.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
    )

    def __init__(self) -> None:
        self._streak: dict[int, float] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.held_back:
            return ()
        step = event.step
        samples: list[Sample] = []
        for index, flag in event.held_back.items():
            labels = optimizer_labels(index)
            streak = self._count(index, flag) if on_host(flag) else Late(partial(self._count, index), flag)
            samples.append(Sample("updates.skipped", step, flag, labels))
            samples.append(Sample("updates.skipped_streak", step, streak, labels))
        return samples

    def _count(self, index: int, flag: float) -> float:
        self._streak[index] = self._streak.get(index, 0.0) + 1.0 if flag else 0.0
        return self._streak[index]
