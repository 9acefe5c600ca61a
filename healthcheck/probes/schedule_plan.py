"""Whether a schedule is stepped as often as it was planned for: in updates, in epochs, or for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.labels import where_made
from healthcheck.probes.looks import Searches

LOOK_EVERY = 20
"""Updates between two looks at how far they have come."""
RARELY = 5.0
"""Updates for each step of a scheduler, from which on it is not stepped per update."""
FEWEST = 2
"""Steps of a scheduler before which nothing is said."""
SAME = 0.02
"""Relative difference within which two numbers of steps are meant to be the same."""
LATE = 0.1
"""How much shorter a plan in updates may be than the run: a warm-up went before it."""


@dataclass(slots=True)
class _Plan:
    name: str
    scheduler: Callable[[], Any]
    length: float
    """Steps for which it is planned."""
    first: int
    found_at: int
    """Its counter when it was found, and the update then."""
    made: int = 0
    """Its own steps since then."""


class SchedulePlanProbe:
    """Compares, when the run is over, the length of each schedule with the updates that were made.

    ``T_max``, ``total_iters`` and their like count calls of ``scheduler.step()``. A schedule whose length is the number of
    updates of the run, or of one epoch, and which was stepped once in many of them, was planned in updates and stepped per
    epoch: its rate has hardly moved. That cannot be known before the end, because 600 epochs may be meant.
    """

    name = "schedule-plan"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "schedule.used",
            "At the end of a run: part of its length that a schedule planned in updates and stepped per epoch got to; else 1.",
            cost=Cost.HOST,
            needs=("a schedule with a length",),
        ),
    )

    def __init__(self) -> None:
        self._searches = Searches()
        self.rests_until = self._searches.coming
        self._plans: list[_Plan] = []
        self._where: dict[str, str] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_END:
            return self._judge(event)
        if event.model is None or event.optimizer is None or event.optimizer_index > 0:
            return ()
        if self._searches.due(event.step):
            self._search(event)
        for plan in self._plans:
            scheduler = plan.scheduler()
            if scheduler is not None:
                plan.made = int(scheduler.last_epoch) - plan.first
        self.rests_until = min(event.step + LOOK_EVERY, self._searches.coming)
        return ()

    def _search(self, event: Event) -> None:
        assert event.model is not None
        stepping = [*event.model.optimizers(), event.optimizer]
        known = [plan.scheduler() for plan in self._plans]
        for scheduler in live_objects("LRScheduler"):
            length = planned_length(scheduler)
            used = any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in stepping)
            if length and used and not any(scheduler is other for other in known):
                made = int(scheduler.last_epoch)
                self._plans.append(_Plan(type(scheduler).__name__, weak(scheduler), length, made, event.step))
                self._where = self._where or where_made(event, scheduler)

    def _judge(self, event: Event) -> Iterable[Sample]:
        if not self._plans:
            return ()
        worst, said = 1.0, ""
        for plan in self._plans:
            scheduler = plan.scheduler()
            made = int(scheduler.last_epoch) - plan.first if scheduler is not None else plan.made
            total = event.step
            # Where it had not been stepped when it was found, it is as old as the run.
            updates = total - (plan.found_at if plan.first else 0)
            if made < FEWEST or updates < RARELY * made:
                continue
            each = updates / made
            whole = (1 - LATE - SAME) * total <= plan.length <= (1 + SAME) * total
            one_epoch = abs(plan.length - each) <= SAME * each + 1
            share = (plan.first + made) / plan.length
            if (whole or one_epoch) and share < worst:
                worst = share
                of = "of the run" if whole else "of one epoch"
                said = (
                    f"{plan.length:,.0f} steps, the updates {of}; {plan.name} was stepped {plan.first + made:,} times"
                )
        facts = {"planned": said} | self._where
        return (Sample("schedule.used", event.step, worst, detail=(lambda: facts) if said else None),)


def planned_length(scheduler: Any) -> float:
    """How many steps a scheduler of torch is planned for, or one of transformers; 0 where it has no end."""
    for name in ("T_max", "total_steps", "total_iters", "T_0"):
        length: Any = getattr(scheduler, name, None)
        if isinstance(length, (int, float)) and length > 0:
            return float(length)
    for function in getattr(scheduler, "lr_lambdas", None) or ():
        keywords: Mapping[str, Any] = getattr(function, "keywords", None) or {}
        length = keywords.get("num_training_steps")
        if isinstance(length, (int, float)) and length > 0:
            return float(length)
    return 0.0


SEVERAL = 1.5
"""Steps per update from which on a scheduler is stepped more than once for each."""
LEAST = 15
"""Updates over which that is counted, at the least."""
_OVERRUN = "schedule.overrun"


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
            _OVERRUN,
            "Steps per update of a CosineAnnealingLR that is past its T_max, if more than one; else 0.",
            cost=Cost.HOST,
            needs=("a schedule", "a cosine schedule that the script steps"),
        ),
    )

    def __init__(self) -> None:
        self._first: dict[int, tuple[Callable[[], Any], int, int]] = {}
        """Of each scheduler: step and count of its steps at the first look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is None or event.optimizer_index > 0 or not demand.due(_OVERRUN, event.step):
            return ()
        cosines = [s for s in event.run.places.things("stepped") if type(s).__name__ == "CosineAnnealingLR"]
        if not cosines:
            return ()
        over = [
            (rate, s) for s in cosines if (rate := self._steps_per_update(s, event.step)) >= SEVERAL and _is_over(s)
        ]
        if not over:
            return (Sample(_OVERRUN, event.step, 0.0),)
        rate, worst = max(over, key=lambda pair: pair[0])
        place = where_made(event, worst, "stepped")

        def facts() -> Mapping[str, Any]:
            return {"T_max": f"{worst.T_max:,}", "steps": f"{worst.last_epoch:,} so far"} | place

        return (Sample(_OVERRUN, event.step, rate, detail=facts),)

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
