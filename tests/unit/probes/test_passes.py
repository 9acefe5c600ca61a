"""Passes over the data: told by a loader, compared by what they begin with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from healthcheck.core.events import EventKind
from healthcheck.instrument.data import begins_pass
from healthcheck.probes.loaders import PassOrderProbe

ROWS = TensorDataset(torch.randn(64, 3), torch.arange(64) % 4)
SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
Batches = Callable[[int], list[torch.Tensor]]


def repeats(first: Batches, optimizer: Callable[[int], torch.optim.Optimizer] = lambda n: SGD) -> list[float]:
    """Three passes of two batches; ``first`` is what each begins with."""
    watched, step = Watched([PassOrderProbe()]), 0
    for number in range(3):
        for begins in (True, False):
            step += 1
            watched.emit(EventKind.BATCH_READY, step, begins_pass=begins)
            watched.emit(EventKind.LOSS, step, batch=first(number) if begins else [torch.randn(32, 3)])
            watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer(number))
    return watched.values("batch.pass_repeat")


LABELS = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(0))


def test_passes_that_begin_alike_are_counted_though_rows_are_augmented() -> None:
    assert repeats(lambda n: [torch.randn(32, 3), LABELS]) == [0.0, 1.0, 2.0]


def test_other_orders_and_rows_that_are_mostly_alike_are_not() -> None:
    assert repeats(lambda n: [torch.randn(32, 3), LABELS.roll(n)]) == [0.0, 0.0, 0.0]
    rare = torch.zeros(32).index_fill(0, torch.tensor(3), 1.0)
    assert repeats(lambda n: [torch.randn(32, 3), rare, torch.ones(32, 8)]) == [0.0, 0.0, 0.0]


def test_a_new_optimizer_begins_a_training_of_its_own() -> None:
    kept = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(3)]
    assert repeats(lambda n: [LABELS], lambda n: kept[n]) == [0.0, 0.0, 0.0]


LOADERS = {
    "shuffled": (lambda: DataLoader(ROWS, 16, shuffle=True), True),
    "a sampler of one's own choice": (lambda: DataLoader(ROWS, 16, sampler=RandomSampler(ROWS)), True),
    "distributed": (lambda: DataLoader(ROWS, 16, sampler=DistributedSampler(ROWS, 2, 0)), True),
    "distributed, in order": (lambda: DataLoader(ROWS, 16, sampler=DistributedSampler(ROWS, 2, 0, False)), False),
    "in order": (lambda: DataLoader(ROWS, 16), False),
}


@pytest.mark.parametrize("case", LOADERS)
def test_the_first_batch_of_a_pass_at_random_is_told(case: str) -> None:
    build, told = LOADERS[case]
    loader = build()
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        assert begins_pass(iterator) is told
        next(iterator)
        assert begins_pass(iterator) is False
