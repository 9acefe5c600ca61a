"""Gradients that are cleared before the update uses them, and updates that use them twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Everything, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.step_order import UPDATES, StepOrderProbe

Step = Callable[["Run"], None]


class Run:
    """A loop whose order of calls the test decides."""

    def __init__(self) -> None:
        self.watched = Watched([StepOrderProbe()], Everything(every=5))
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 1

    def backward(self) -> None:
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.watched.emit(EventKind.LOSS, self.step, loss=loss.detach(), model=View(self.model))
        loss.backward()

    def update(self) -> None:
        self.watched.emit(EventKind.BEFORE_UPDATE, self.step, optimizer=self.optimizer, model=View(self.model))
        self.optimizer.step()
        self.step += 1


def usual(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.update()


def cleared(run: Run) -> None:
    run.backward()
    run.optimizer.zero_grad()
    run.update()


def zeroed(run: Run) -> None:
    run.backward()
    run.optimizer.zero_grad(set_to_none=False)
    run.update()


def update_first(run: Run) -> None:
    run.optimizer.zero_grad()
    run.update()
    run.backward()


def unused(run: Run) -> None:
    """Another model is trained: no gradient ever comes here."""
    run.watched.emit(EventKind.LOSS, run.step, loss=torch.tensor(1.0))
    run.update()


@pytest.mark.parametrize("order", [cleared, zeroed, update_first])
def test_gradients_that_come_and_go_before_the_update_are_counted(order: Step) -> None:
    run = Run()
    for _ in range(12):
        order(run)
    assert run.watched.of("grads.cleared") == [(6, 1.0), (11, 1.0)]
    assert run.watched.facts("grads.cleared")["tensors"].startswith("4 of 4 sampled tensors")


@pytest.mark.parametrize("order", [usual, unused])
def test_gradients_that_stay_or_never_came_are_not(order: Step) -> None:
    run = Run()
    for _ in range(12):
        order(run)
    assert set(run.watched.values("grads.cleared")) == {0.0}


def test_no_hook_is_left_on_a_parameter() -> None:
    run = Run()
    for _ in range(5):
        cleared(run)
    assert any(p._post_accumulate_grad_hooks for p in run.model.parameters())  # armed for the next pass
    run.watched.close()
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())


def test_a_second_update_with_the_same_gradients_is_counted() -> None:
    run = Run()
    while run.step <= UPDATES:
        usual(run)
        run.update()
    assert run.watched.last("updates.reused") == 0.5


def test_gradients_that_a_script_writes_itself_are_not_reused() -> None:
    run = Run()
    usual(run)
    while run.step <= UPDATES:
        for parameter in run.model.parameters():
            parameter.grad.copy_(torch.randn_like(parameter))
        run.update()
    assert run.watched.last("updates.reused") == 0.0


def test_accumulation_and_a_gradient_that_is_never_cleared_are_not_reuse() -> None:
    run = Run()
    while run.step <= UPDATES:
        run.backward()
        run.backward()
        run.update()
    assert run.watched.last("updates.reused") == 0.0
