"""Schedulers that nobody steps, and those that only look as if."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import SWALR

from healthcheck.core.events import EventKind
from healthcheck.probes.optimizers import LOOKS, IdleOptimizerProbe

BATCHES = 80
"""Batches in a pass over the data."""

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")


def watch(
    build: Callable[[torch.optim.Optimizer], Any],
    updates: int,
    each_update: Callable[[torch.optim.Optimizer, Any, int], None] = lambda optimizer, kept, made: None,
    *,
    batches: int = BATCHES,
    epoch: bool = False,
) -> list[tuple[int, float]]:
    """Train with what ``build`` keeps; what was said of schedulers that nobody steps, by update."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = build(optimizer)
    watched = Watched([IdleOptimizerProbe()])
    view = View(model, [optimizer])
    for step in range(1, updates + 1):
        if batches:
            size = 32 * batches if batches > 0 else None
            watched.emit(EventKind.BATCH_READY, step, model=view, n_samples=32, dataset_size=size)
        told = float(step // BATCHES) if epoch else None
        watched.emit(EventKind.BEFORE_UPDATE, step, model=view, optimizer=optimizer, epoch=told)
        optimizer.step()
        each_update(optimizer, kept, step)
    return watched.of("schedule.unstepped")


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=10)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return LinearLR(optimizer, start_factor=0.01, total_iters=5)


def in_turn(optimizer: torch.optim.Optimizer) -> Any:
    return SequentialLR(optimizer, [warm_up(optimizer), decay(optimizer)], milestones=[5])


def test_a_decay_that_nobody_steps_is_told_after_ten_passes() -> None:
    assert watch(decay, 10 * BATCHES) == [(10 * BATCHES, 1.0)]


@pytest.mark.parametrize("build", [warm_up, in_turn])
def test_a_warm_up_that_nobody_steps_is_told_after_two_passes_and_a_bit(build: Callable[..., Any]) -> None:
    (told,) = watch(build, 3 * BATCHES)
    assert told == (176, 1.0)  # 2.2 passes


def test_with_short_passes_it_is_told_at_the_first_look() -> None:
    assert watch(decay, LOOKS[0], batches=4) == [(LOOKS[0], 1.0)]


def test_where_nobody_tells_how_long_a_pass_is_it_takes_longer() -> None:
    assert watch(warm_up, LOOKS[1], batches=0) == [(LOOKS[1], 1.0)]
    assert watch(decay, LOOKS[1], batches=0) == []


def test_a_stream_of_unknown_length_may_be_within_its_first_pass() -> None:
    assert watch(warm_up, LOOKS[1], batches=-1) == []


def test_where_a_framework_tells_the_epoch_that_counts() -> None:
    (told,) = watch(warm_up, 5 * BATCHES, epoch=True)
    assert told[1] == 1.0
    assert LOOKS[0] + 2 * BATCHES <= told[0] <= LOOKS[0] + 4 * BATCHES


def once_in_a_pass(optimizer: torch.optim.Optimizer, kept: Any, made: int) -> None:
    if made % BATCHES == 0:
        kept.step()


def by_hand(optimizer: torch.optim.Optimizer, kept: Any, made: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / made


def only_the_first(optimizer: torch.optim.Optimizer, kept: Any, made: int) -> None:
    kept[0].step()


QUIET = {
    "stepped per epoch": (decay, once_in_a_pass),
    "a warm-up stepped per epoch": (warm_up, once_in_a_pass),
    "in turn, stepped per epoch": (in_turn, once_in_a_pass),
    "chained": (lambda o: ChainedScheduler([StepLR(o, 3), warm_up(o)]), once_in_a_pass),
    "another one is in use": (lambda o: (StepLR(o, 30), decay(o)), only_the_first),
    "it begins late": (lambda o: SWALR(o, swa_lr=0.001), lambda optimizer, kept, made: None),
    "the script sets the rate": (decay, by_hand),
    "none": (lambda o: None, lambda optimizer, kept, made: None),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_in_use_or_meant_for_later_is_silent(case: str) -> None:
    build, each = QUIET[case]
    assert {value for _, value in watch(build, 10 * BATCHES, each)} == {0.0}
