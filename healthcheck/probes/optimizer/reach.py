"""Whether a schedule takes the learning rate to where it is meant to go before the run is over."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.optimizer.learning_rate import largest_rate
from healthcheck.probes.values import on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

REACHED = 0.1
"""Part of its goal from which on a schedule is no longer looked at."""
SETTLED = 50
"""Updates before which nothing is said."""
LATE = 0.5
"""Part of the planned steps after which a warm-up should be well under way."""
TREAD, TREADS = 8, 4
"""Updates at one and the same rate that make a stair, and stairs after which OneCycleLR is taken for stepped per epoch."""


class ScheduleReachProbe:
    """Follows the rate of the first optimizer while a scheduler of torch keeps it below a tenth of its goal.

    The goal is the peak of a ``OneCycleLR``, else the rate that the optimizer was built with. It is out of reach where
    more than half of the planned steps are over (frameworks say how many), where a ``OneCycleLR``, which counts
    updates, moves only every few dozen of them, and where the rate began below a hundredth and falls: a ``LambdaLR``
    whose function returns the rate itself, and not its factor. Runs that go on from a checkpoint are not judged.
    """

    name = "schedule-reach"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "lr.reached", "Highest rate so far as a part of the schedule's goal, once that is out of reach; else 1."
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._planned: int | None = None
        self._updates = 0
        self._first = self._highest = self._rate = 0.0
        self._tread = 0
        self._stairs = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:
            self._planned = event.max_steps
            return ()
        if event.optimizer is None or event.optimizer_index > 0:
            return ()
        rate, goal = largest_rate(event.optimizer), scheduled_goal(event.optimizer)
        goes_on = not self._updates and (event.step > 1 or len(event.optimizer.state) > 0)
        if rate is None or not on_host(rate) or goes_on or (self._updates and not goal) or rate >= REACHED * goal > 0:
            self.rests_until = sys.maxsize
            return (Sample("lr.reached", event.step, 1.0),)
        self._follow(rate)
        if goal <= 0 or self._updates < SETTLED or not demand.due("lr.reached", event.step):
            return ()
        why = self._out_of_reach(event, goal)
        value = self._highest / goal if why else 1.0

        def facts() -> Mapping[str, Any]:
            return {"goal": f"{goal:.3g}", "highest": f"{self._highest:.3g}", "why": why}

        return (Sample("lr.reached", event.step, value, detail=facts if why else None),)

    def _follow(self, rate: float) -> None:
        if not self._updates:
            self._first = rate
        elif rate == self._rate:
            self._tread += 1
        else:
            self._stairs += self._tread + 1 >= TREAD
            self._tread = 0
        self._updates += 1
        self._rate = rate
        self._highest = max(self._highest, rate)

    def _out_of_reach(self, event: Event, goal: float) -> str:
        if self._planned and event.step > LATE * self._planned:
            return f"{event.step:,} of {self._planned:,} planned steps are over"
        if self._stairs >= TREADS and "max_lr" in event.optimizer.param_groups[0]:
            return f"OneCycleLR counts updates and was stepped only {self._stairs} times in {self._updates:,} of them"
        if self._rate < self._first == self._highest < 0.01 * goal:
            return "it began there and falls"
        return ""


def scheduled_goal(optimizer: Any) -> float:
    """The rate that the schedule is meant to reach; 0 where no scheduler of torch drives it."""
    goals = [group.get("max_lr", group.get("initial_lr")) for group in optimizer.param_groups]
    known = [float(goal) for goal in goals if goal is not None and (isinstance(goal, (int, float)) or on_host(goal))]
    return max(known, default=0.0)
