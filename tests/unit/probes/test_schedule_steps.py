"""Schedulers that are stepped more than once for each update, and whether their length was meant so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.optim import lr_scheduler

from healthcheck.core.events import EventKind
from healthcheck.probes.schedule_plan import ScheduleStepsProbe

Build = Callable[[torch.optim.Optimizer], list[lr_scheduler.LRScheduler]]


def overrun(build: Build, *, per_update: int, steps: int = 80) -> list[float]:
    """What the probe says at every tenth update."""
    watched = Watched([ScheduleStepsProbe()])
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    stepped = build(optimizer)
    for step in range(1, steps + 1):
        optimizer.step()
        for _ in range(per_update):
            for scheduler in stepped:
                scheduler.step()
                watched.run.places.note(scheduler, "train.py:9", "stepped")
        if step % 10 == 0:
            watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
    return watched.values("schedule.overrun")


def cosine(length: float) -> Build:
    return lambda o: [lr_scheduler.CosineAnnealingLR(o, T_max=length)]


def warm_up_and(length: int) -> Build:
    def build(o: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
        parts = [lr_scheduler.LinearLR(o, 0.1, 1.0, 20), lr_scheduler.CosineAnnealingLR(o, T_max=length)]
        return [lr_scheduler.SequentialLR(o, parts, [20])]

    return build


def test_a_cosine_of_updates_that_is_stepped_per_micro_batch_is_counted_once_it_is_over() -> None:
    assert overrun(cosine(200), per_update=4) == [0, 0, 0, 0, 0, pytest.approx(4), pytest.approx(4), pytest.approx(4)]
    assert overrun(cosine(100), per_update=2)[5:] == [pytest.approx(2)] * 3


@pytest.mark.parametrize(
    ("build", "per_update"),
    [
        (cosine(80), 1),
        (cosine(4 * 80), 4),
        (cosine(20), 1),
        (cosine(float("inf")), 4),
        (lambda o: [lr_scheduler.CosineAnnealingWarmRestarts(o, 20)], 4),
        (lambda o: [lr_scheduler.StepLR(o, 30)], 4),
        (lambda o: [lr_scheduler.CosineAnnealingLR(o, 80), lr_scheduler.ExponentialLR(o, 0.99)], 1),
        (warm_up_and(300), 4),
    ],
    ids=[
        "as planned",
        "planned in micro-batches",
        "up and down",
        "no end",
        "restarts",
        "steps",
        "two schedulers",
        "warm-up",
    ],
)
def test_schedules_that_are_stepped_as_they_were_planned_are_not(build: Build, per_update: int) -> None:
    assert set(overrun(build, per_update=per_update)) <= {0.0}
