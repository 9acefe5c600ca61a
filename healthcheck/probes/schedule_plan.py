"""Whether a schedule is stepped as often as it was planned for: in updates, in epochs, or for each micro-batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.labels import where_made
from healthcheck.probes.looks import Searches, ask_again, next_look

LOOK_EVERY = 20
"""Updates between two looks at how far they have come."""
RARELY = 5.0
"""Updates for each step of a scheduler, from which on it is not stepped per update."""
FEWEST = 2
"""Steps of a scheduler before which nothing is said."""
SAME = 0.02
"""Relative difference within which two numbers of steps are meant to be the same."""
LEAST_UPDATES = 100
"""Updates of a run from which on it can be said that a schedule was over at once."""
EARLY, FALLEN = 0.1, 0.5
"""Part of a run within which no schedule is over on purpose, and to which part of the rate it has come down by then."""
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
    ends: float = 0.0
    """Steps after which a rate that comes down stays as it is; 0 where it does not, or never comes down."""
    share: float = 1.0
    """The rate at the last look, as a part of that at the beginning."""


class SchedulePlanProbe:
    """Compares, when the run is over, the length of each schedule with the updates that were made.

    ``T_max``, ``total_iters`` and their like count calls of ``scheduler.step()``. A schedule whose length is the number of
    updates of the run, or of one epoch, and which was stepped once in many of them, was planned in updates and stepped per
    epoch: its rate has hardly moved. That cannot be known before the end, because 600 epochs may be meant.
    """

    name = "schedule-plan"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "schedule.used",
            "At the end of a run: part of its length that a schedule planned in updates and stepped per epoch got to; else 1.",
            cost=Cost.HOST,
            needs=("a schedule with a length",),
        ),
        Metric(
            "schedule.over",
            "At the end of a run: the part of it after which a schedule that is stepped per update had come down for good, if"
            " that was at once; else 0.",
            cost=Cost.HOST,
            needs=("a schedule with a length",),
        ),
        Metric(
            "schedule.of_micro_batches",
            "At the end of a run: part of its length that a schedule got to that is as long as the run has micro-batches, and"
            " stepped per update; else 1.",
            cost=Cost.HOST,
            needs=("a schedule with a length",),
        ),
    )

    def __init__(self) -> None:
        self._searches = Searches()
        self._passes: list[int] = []
        """Backward passes of each update that was looked at."""
        self._in_step = (0, 0)
        """Of the update at hand: its step, and its passes so far."""
        self.rests_until = self._searches.coming
        self._plans: list[_Plan] = []
        self._where: dict[str, str] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_END:
            return [*self._judge(event), *self._judge_unit(event)]
        if event.kind is EventKind.LOSS:
            step, passes = self._in_step
            self._in_step = event.step, passes + 1 if step == event.step else 1
            return ()
        if event.model is None or event.optimizer is None or event.optimizer_index > 0:
            return ()
        if self._in_step[0] == event.step:
            self._passes.append(self._in_step[1])
        if self._searches.due(event.step):
            self._search(event)
        for plan in self._plans:
            scheduler = plan.scheduler()
            if scheduler is not None:
                plan.made = int(scheduler.last_epoch) - plan.first
                plan.share = _share_of_first(scheduler)
        # Without a schedule there is nothing to see between two searches.
        coming = self._searches.coming
        self.rests_until = min(next_look(event.step, LOOK_EVERY), coming) if self._plans else coming
        return ()

    def _search(self, event: Event) -> None:
        assert event.model is not None
        stepping = [*event.model.optimizers(), event.optimizer]
        known = [plan.scheduler() for plan in self._plans]
        for scheduler in live_objects("LRScheduler"):
            length, ends = planned_length(scheduler), decay_ends(scheduler)
            used = any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in stepping)
            if (length or ends) and used and not any(scheduler is other for other in known):
                made = int(scheduler.last_epoch)
                self._plans.append(_Plan(type(scheduler).__name__, weak(scheduler), length, made, event.step, 0, ends))
                self._where = self._where or where_made(event, scheduler)

    def _judge(self, event: Event) -> Iterable[Sample]:
        plans = [plan for plan in self._plans if plan.length]
        if not plans:
            return ()
        worst, said = 1.0, ""
        for plan in plans:
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

    def _judge_unit(self, event: Event) -> Iterable[Sample]:
        """Schedules that are stepped per update: were they planned in epochs, or in micro-batches?"""
        updates = event.step
        each = statistics.median(self._passes) if self._passes else 1.0
        over, used, said_over, said_used = 0.0, 1.0, "", ""
        for plan in self._plans:
            scheduler = plan.scheduler()
            if scheduler is not None:
                plan.made, plan.share = int(scheduler.last_epoch) - plan.first, _share_of_first(scheduler)
            made = plan.first + plan.made
            if updates < LEAST_UPDATES or not (1 - LATE) * updates <= made <= (1 + LATE) * updates:
                continue
            if plan.ends and plan.ends <= EARLY * updates and plan.share <= FALLEN:
                over = max(over, plan.ends / updates)
                said_over = f"{plan.name} was over after {plan.ends:,.0f} of {updates:,} updates"
            passes = each * updates
            if plan.length and each > 1 and abs(plan.length - passes) <= LATE * updates:
                used = min(used, made / plan.length)
                said_used = f"{plan.name} of {plan.length:,.0f} steps; {updates:,} updates of {each:g} micro-batches"
        if not self._plans:
            return ()
        samples = []
        for key, value, said in (
            ("schedule.over", over, said_over),
            ("schedule.of_micro_batches", used, said_used),
        ):
            facts = {"planned": said} | self._where
            samples.append(Sample(key, event.step, value, detail=partial(dict[str, Any], facts) if said else None))
        return samples


def _share_of_first(scheduler: Any) -> float:
    """The largest rate of its optimizer now, as a part of what it began with."""
    shares = [
        float(group["lr"]) / float(group["initial_lr"])
        for group in scheduler.optimizer.param_groups
        if group.get("initial_lr")
    ]
    return max(shares, default=1.0)


def decay_ends(scheduler: Any) -> float:
    """After how many steps a schedule of torch that only lowers the rate is over; 0 for others."""
    milestones, gamma = getattr(scheduler, "milestones", None), getattr(scheduler, "gamma", 1.0)
    if type(scheduler).__name__ == "MultiStepLR" and milestones and gamma < 1:
        return float(max(milestones))
    if type(scheduler).__name__ == "PolynomialLR":
        return float(scheduler.total_iters)
    if type(scheduler).__name__ == "LinearLR" and scheduler.end_factor < scheduler.start_factor:
        return float(scheduler.total_iters)
    return 0.0


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


FALLS, LOWERED = 2, 0.5
"""Times that a rate was lowered, and the part of its first value that it is at most, before other groups count as left behind."""


class GroupRateProbe:
    """Looks for parameter groups whose rate stays as it was while that of the first group is lowered by hand.

    ``optimizer.param_groups[0]["lr"] = ...`` reaches the first group alone. Only groups that began with the rate of the first
    count, and only optimizers without a scheduler: these have a rate for each group.
    """

    name = "group-rates"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "lr.groups_left",
            "Parameter groups that keep the rate of the beginning while that of the first group was lowered by hand.",
            cost=Cost.HOST,
            needs=("several parameter groups",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._first: tuple[Callable[[], Any], list[float]] = (lambda: None, [])
        self._falls: list[float] = []
        self._moved: set[int] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if optimizer is None or event.optimizer_index > 0 or not demand.due("lr.groups_left", event.step):
            return ()
        groups = optimizer.param_groups
        if len(groups) < 2 or any("initial_lr" in group for group in groups):
            self.rests_until = max(ask_again(event.step), demand.next_due(("lr.groups_left",), event.step))
            return ()
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        if self._first[0]() is not optimizer or len(rates) != len(self._first[1]):
            self._first, self._falls, self._moved = (weak(optimizer), rates), rates[:1], set()
        begun = self._first[1]
        self._moved |= {k for k, rate in enumerate(rates) if rate != begun[k]}
        if rates[0] < self._falls[-1]:
            self._falls.append(rates[0])
        left = [k for k in range(1, len(rates)) if begun[k] == begun[0] and k not in self._moved]
        lowered = len(self._falls) > FALLS and rates[0] <= LOWERED * begun[0]
        value = float(len(left)) if lowered else 0.0
        facts = {"rates": ", ".join(f"{rate:.3g}" for rate in rates[:6])} | where_made(event, optimizer)
        return (Sample("lr.groups_left", event.step, value, detail=(lambda: facts) if value else None),)
