"""Whether steps get slower for a reason of their own."""

from __future__ import annotations

import torch
from driver import Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.memory_readings import waited_for_cpu
from healthcheck.probes.steps import PaceProbe, terms


class Machine:
    """A clock that the test sets, and what of its time was waiting for a processor."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0


def pace(*, seconds: float, rows: int, waiting: float) -> float:
    """After 200 steps over which the time of a step, the rows of a batch and the waits grow by these factors."""
    machine = Machine()
    watched = Watched([PaceProbe(lambda: machine.now, lambda: machine.waited)])
    layer = nn.Linear(4, 8)
    for step in range(1, 201):
        part = (step - 1) / 199
        batch = torch.randn(int(16 * (1 + (rows - 1) * part)), 4)
        loss = nn.functional.cross_entropy(layer(batch), torch.zeros(len(batch), dtype=torch.long))
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
        work, wait = 0.01 * (1 + (seconds - 1) * part), 0.01 * (waiting - 1) * part
        machine.now += work + wait
        machine.waited += wait
        watched.emit(EventKind.STEP_END, step)
    return float(watched.last("time.pace"))


def test_steps_that_take_longer_for_the_same_work_are_slower() -> None:
    assert pace(seconds=3, rows=1, waiting=1) > 1.8


def test_steps_that_do_more_are_not() -> None:
    assert pace(seconds=3, rows=3, waiting=1) < 1.2


def test_steps_beside_a_busy_neighbour_are_not() -> None:
    assert pace(seconds=1, rows=1, waiting=3) < 1.05


def test_the_largest_shape_near_the_root_counts() -> None:
    layer = nn.Linear(4, 8)
    loss = nn.functional.cross_entropy(layer(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long))
    assert terms(loss.grad_fn) == 40
    assert terms(layer(torch.randn(5, 4)).pow(2).mean().grad_fn) == 40


def test_the_wait_for_a_processor_is_a_time_that_does_not_fall() -> None:
    before = waited_for_cpu()
    assert 0.0 <= before <= waited_for_cpu()
