"""Schedulers that were built and that nobody steps, told apart from those that are stepped once in an epoch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event
from healthcheck.probes.optimizer.learning_rate import largest_rate
from healthcheck.probes.optimizer.reach import scheduled_goal
from healthcheck.probes.values import on_host
from healthcheck.references import weak
from healthcheck.samples import Sample

BELOW = 0.5
"""Part of the schedule's goal below which a rate is that of a warm-up: nobody holds that back on purpose."""
WARM_UP_PASSES, PASSES = 2.2, 10.0
"""Passes over the data after which a schedule that is stepped per epoch has been stepped: a warm-up, and any other."""
WARM_UP_BLIND, BLIND = 1_500, 10_000
"""Updates that stand for these passes where no loader tells how long one is. A stream may be long: it counts as any other."""
LOOK_EVERY = 100
"""Updates between two looks where a framework tells the epoch."""
_BEGIN_LATE = frozenset({"SWALR"})
"""Schedulers that are built with the others, and stepped for the first time in the last part of a training."""


class UnsteppedSchedules:
    """Optimizers that step and none of whose schedulers has ever been stepped.

    It is not enough that no scheduler has been stepped: many are stepped at the end of an epoch, and some only once
    a warm-up by hand is over. So the count waits for some passes over the data. A rate that is another one than the
    scheduler set is the script's own, and no fault.
    """

    def __init__(self) -> None:
        self._pass = 0
        """Updates of the longest pass over the data, at the most; 0: unknown."""
        self._streams = False
        """Whether a loader does not tell its length."""
        self._epoch: float | None = None
        """At the look around, where a framework tells it."""
        self._waiting: list[Callable[[], Any]] = []
        """Schedulers that had not been stepped when last looked at."""
        self.next_look = sys.maxsize
        """Updates after which there is something to judge."""

    def batch(self, event: Event) -> None:
        """A batch of the first step: how many of its kind make a pass? Fewer updates than batches do no harm."""
        if event.n_samples and event.dataset_size:
            self._pass = max(self._pass, math.ceil(event.dataset_size / event.n_samples))
        else:
            self._streams = True

    def look(self, schedulers: Sequence[tuple[Any, Any]], stepping: Sequence[Any], made: int, event: Event) -> None:
        """The living schedulers, each with its optimizer, after so many updates."""
        if self._epoch is None:
            self._epoch = event.epoch
        self._waiting = [weak(s) for s, _ in _unstepped(schedulers, stepping)]
        self.next_look = made

    def judge(self, event: Event, made: int) -> Iterable[Sample]:
        """How many optimizers it is by now; nothing before that can be told."""
        step = event.step
        alive = (ref() for ref in self._waiting)
        there = [
            (s, s.optimizer) for s in alive if s is not None and s.last_epoch <= 0 and _sets_the_rate(s, s.optimizer)
        ]
        if not there:
            self.next_look = sys.maxsize
            return (Sample("schedule.unstepped", step, 0.0),)
        needed = {id(o): self._needed(o, made, event.epoch) for _, o in there}
        self.next_look = min((n for n in needed.values() if n > made), default=sys.maxsize)
        hit = [(s, o) for s, o in there if needed[id(o)] <= made]
        if not hit:
            return ()
        names = ", ".join(sorted({type(s).__name__ for s, _ in hit}))
        rate = largest_rate(hit[0][1])

        def facts() -> Mapping[str, Any]:
            return {"which": names, "updates": f"{made:,}", "lr": f"{rate:.3g}, as it was when the scheduler was built"}

        count = len({id(o) for _, o in hit})
        return (Sample("schedule.unstepped", step, float(count), detail=facts),)

    def _needed(self, optimizer: Any, made: int, epoch: float | None) -> int:
        """Updates after which one of its schedulers would have been stepped, or after which it is asked again."""
        rate, goal = largest_rate(optimizer), scheduled_goal(optimizer)
        warms_up = rate is not None and on_host(rate) and rate < BELOW * goal
        passes = WARM_UP_PASSES if warms_up else PASSES
        if epoch is not None and self._epoch is not None:
            return made if epoch - self._epoch >= passes else made + LOOK_EVERY
        if self._pass and not self._streams:
            return math.ceil(passes * self._pass)
        return WARM_UP_BLIND if warms_up and not self._streams else BLIND


def _unstepped(schedulers: Sequence[tuple[Any, Any]], stepping: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Of optimizers none of whose schedulers has been stepped: parts of a ``SequentialLR`` wait for their turn."""
    used = {id(o) for s, o in schedulers if s.last_epoch > 0}
    for scheduler, optimizer in schedulers:
        if not any(optimizer is s for s in stepping) or id(optimizer) in used or scheduler.optimizer is not optimizer:
            continue
        if type(scheduler).__name__ not in _BEGIN_LATE and _sets_the_rate(scheduler, optimizer):
            yield scheduler, optimizer


def _sets_the_rate(scheduler: Any, optimizer: Any) -> bool:
    """Whether the rates in use are those that it left."""
    rates, left = [group["lr"] for group in optimizer.param_groups], getattr(scheduler, "_last_lr", None)
    return isinstance(left, list) and len(left) == len(rates) and all(map(_alike, rates, left))


def _alike(rate: Any, left: Any) -> bool:
    return on_host(rate) and on_host(left) and float(rate) == float(left)
