"""Loader workers that draw one and the same random numbers, or draw them again in each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


class WorkerDrawProbe:
    """Compares the generators that loader workers draw from, as they were before each worker's first batches.

    torch seeds its own generator, ``random`` and numpy's global one differently in each worker and each pass. A seed
    set in ``worker_init_fn`` undoes that, and a generator of the data set's own is copied into all workers as it is.
    Counted are generators that two workers found in one state, before their first batch and before their second, and
    drew from for both. Rows and streams of numbers that are only looked up are no draws.
    """

    name = "worker-draws"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY,)
    only_with = "worker_draws"
    provides: tuple[Metric, ...] = (
        Metric(
            "workers.alike",
            "Random generators from which loader workers draw the same numbers as one another.",
            cost=Cost.HOST,
            needs=("forked loader workers over a map-style data set",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        told = event.worker_draws
        if event.phase != "train" or not told or len(told) < 2:
            return ()
        found = Counter((name, *marks) for draws in told for name, marks in draws.items() if len(marks) > 1)
        alike = {tuple(marks): (name, count) for (name, *marks), count in found.items() if count > 1}

        def facts() -> Mapping[str, Any]:
            names = ", ".join(name for name, _ in alike.values())
            most = max((count for _, count in alike.values()), default=0)
            return {"which": names, "workers": f"{most} of {len(told)}"} if alike else {}

        return (Sample("workers.alike", event.step, float(len(alike)), detail=facts),)
