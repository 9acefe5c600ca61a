"""Whether a schedule was stepped as often as it was planned for: in updates, or in epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.tensors import live_objects
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
