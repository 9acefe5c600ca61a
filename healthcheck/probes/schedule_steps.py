"""How often a scheduler is stepped for each update, against the length that it was built for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.probes.labels import where_made

SEVERAL = 1.5
"""Steps per update from which on a scheduler is stepped more than once for each."""
LEAST = 15
"""Updates over which that is counted, at the least."""
_KEY = "schedule.overrun"


class ScheduleStepsProbe:
    """Counts the steps of each ``CosineAnnealingLR`` per update, once it is past its ``T_max``.

    Stepping a scheduler for each micro-batch is right where its length counts micro-batches. A cosine that is stepped
    several times per update *and* has passed its end was built for updates: its rate comes down too early, and rises
    again after that. Schedulers are those that the script was seen to step; nothing is searched. What a schedule begins
    with after a resume is where it went on from, so that only steps of this run are counted.
    """

    name = "schedule-steps"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            "Steps per update of a CosineAnnealingLR that is past its T_max, if more than one; else 0.",
            cost=Cost.HOST,
            needs=("a schedule", "a cosine schedule that the script steps"),
        ),
    )

    def __init__(self) -> None:
        self._first: dict[int, tuple[Callable[[], Any], int, int]] = {}
        """Of each scheduler: step and count of its steps at the first look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is None or event.optimizer_index > 0 or not demand.due(_KEY, event.step):
            return ()
        cosines = [s for s in event.run.places.things("stepped") if type(s).__name__ == "CosineAnnealingLR"]
        if not cosines:
            return ()
        over = [
            (rate, s) for s in cosines if (rate := self._steps_per_update(s, event.step)) >= SEVERAL and _is_over(s)
        ]
        if not over:
            return (Sample(_KEY, event.step, 0.0),)
        rate, worst = max(over, key=lambda pair: pair[0])
        place = where_made(event, worst, "stepped")

        def facts() -> Mapping[str, Any]:
            return {"T_max": f"{worst.T_max:,}", "steps": f"{worst.last_epoch:,} so far"} | place

        return (Sample(_KEY, event.step, rate, detail=facts),)

    def _steps_per_update(self, scheduler: Any, step: int) -> float:
        known = self._first.get(id(scheduler))
        if known is None or known[0]() is not scheduler:
            self._first[id(scheduler)] = (weak(scheduler), step, int(scheduler.last_epoch))
            return 0.0
        _, first, count = known
        return (int(scheduler.last_epoch) - count) / (step - first) if step - first >= LEAST else 0.0


def _is_over(scheduler: Any) -> bool:
    length = scheduler.T_max
    return isinstance(length, (int, float)) and math.isfinite(length) and scheduler.last_epoch > length > 0
