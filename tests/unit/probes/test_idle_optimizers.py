"""Optimizers without a step and schedulers of none that steps: they live, and nobody uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, StepLR

from healthcheck.core.events import EventKind
from healthcheck.probes.optimizers import LOOKS, IdleOptimizerProbe


def watch(build: Callable[[nn.Module, nn.Module], tuple[torch.optim.Optimizer, object]]) -> dict[str, float]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer, kept = build(first, second)
    scheduler = kept[0] if isinstance(kept, tuple) else None
    watched = Watched([IdleOptimizerProbe()])
    view = View(nn.Sequential(first, second), [optimizer])
    for step in range(1, LOOKS[0] + 2):
        second(first(torch.ones(2, 4))).sum().backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, model=view, optimizer=optimizer)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    assert [step for step, _ in watched.of("schedule.elsewhere")] == [LOOKS[0]]
    assert len(watched.of("optimizer.idle")) == 1
    return {name: watched.last(name) for name in watched.names()}


def sgd(*parts: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01)


def test_an_optimizer_that_nobody_steps_is_counted_with_its_tensors() -> None:
    assert watch(lambda first, second: (sgd(second), [sgd(first)]))["optimizer.idle"] == 2


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_of_an_optimizer_that_was_built_anew_is_counted() -> None:
    def build(first: nn.Module, second: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        return sgd(first, second), (StepLR(sgd(first, second), 30),)

    assert watch(build)["schedule.elsewhere"] == 1


def test_the_cycles_of_a_cosine_that_counts_epochs_are_counted() -> None:
    def build(first: nn.Module, second: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = sgd(first, second)
        return optimizer, (CosineAnnealingLR(optimizer, T_max=10),)

    assert watch(build)["schedule.half_cycles"] == (LOOKS[0] - 1) / 10


QUIET = {
    "one optimizer": lambda o: (),
    "a scheduler of its own": lambda o: (StepLR(o, 30),),
    "one cosine": lambda o: (CosineAnnealingLR(o, T_max=LOOKS[0]),),
    "cycles on purpose": lambda o: (CyclicLR(o, 0.001, 0.01, step_size_up=10),),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_in_use_is_silent(case: str) -> None:
    def build(first: nn.Module, second: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = sgd(first, second)
        return optimizer, QUIET[case](optimizer) or None

    assert set(watch(build).values()) == {0.0}


@pytest.mark.parametrize("left", [False, True], ids=["none", "one of another training"])
def test_an_optimizer_of_parameters_that_get_no_gradient_is_silent(left: bool) -> None:
    other = nn.Linear(2, 2)
    if left:
        other(torch.ones(1, 2)).sum().backward()
    assert watch(lambda first, second: (sgd(first, second), [sgd(other)]))["optimizer.idle"] == 0


def test_the_scheduler_of_an_optimizer_that_did_its_part_before_is_silent() -> None:
    def build(first: nn.Module, second: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        before = sgd(first, second)
        warm_up = StepLR(before, 30)
        for _ in range(20):
            before.step()
            warm_up.step()
        return sgd(first, second), [warm_up]

    assert watch(build)["schedule.elsewhere"] == 0
