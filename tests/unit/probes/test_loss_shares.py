"""Losses that are divided for more micro-batches than their updates have."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.leftover import FIRST_PASSES, LossShareProbe, share_of

NET, X, Y = nn.Linear(6, 3), torch.randn(16, 6), torch.arange(16) % 3
OUT = NET(X)
ANSWERS = nn.Linear(6, 1)(X)


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        (lambda: F.cross_entropy(OUT, Y) / 4, 4),
        (lambda: F.cross_entropy(OUT, Y) * 0.25, 4),
        (lambda: F.binary_cross_entropy_with_logits(ANSWERS, torch.ones(16, 1)) / 5, 5),
        (lambda: F.smooth_l1_loss(ANSWERS, torch.ones(16, 1)).squeeze() / 8 * 1024, 8),
        (lambda: F.cross_entropy(OUT, Y), 0),
        (lambda: F.mse_loss(ANSWERS, torch.ones(16, 1)) / 2, 0),  # half a square
        (lambda: F.cross_entropy(OUT, Y, reduction="sum") / 4, 0),
        (lambda: F.cross_entropy(OUT, Y) / len(X), 0),
        (lambda: F.cross_entropy(OUT, Y) / 3, 0),  # as many as there are classes
        (lambda: F.cross_entropy(OUT, Y) / 4.5, 0),
        (lambda: (F.cross_entropy(OUT, Y) + F.cross_entropy(OUT.flip(0), Y)) / 4, 0),  # a mean of terms
        (lambda: OUT.square().mean() / 4, 0),
    ],
)
def test_what_a_mean_over_rows_is_divided_by(loss: object, share: float) -> None:
    assert share_of(loss().grad_fn) == share  # type: ignore[operator]


def said(groups: Iterable[int], *, by: float = 4, clipped: int = 0, optimizers: int = 1) -> float:
    """:param groups: passes of each update. :param clipped: each update of so many is clipped."""
    watched, passes, made = Watched([LossShareProbe()]), 0, [torch.optim.SGD(NET.parameters(), lr=0.1)] * optimizers
    for step, group in enumerate(groups, 1):
        for _ in range(group):
            loss = F.cross_entropy(NET(X), Y) / by
            watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
            passes += 1
        norm = 1.0 if clipped and step % clipped == 0 else None
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=made[0], model=View(NET, made), max_norm=norm)
    assert passes >= FIRST_PASSES
    return sum(watched.values("updates.of_few_passes"))


def test_updates_of_fewer_passes_are_told_where_micro_batches_are_meant() -> None:
    assert said([1, 1, 1, 2] * 20, by=5) == 5
    assert said([1] * 80, clipped=4) == 4


def test_groups_as_long_as_the_loss_says_and_divisions_for_other_reasons_are_silent() -> None:
    assert said([4] * 20) == 0
    assert said([4, 4, 4, 2] * 6) == 0  # the end of each epoch
    assert said([3] * 30) == 0
    assert said([1] * 80) == 0  # nothing says that micro-batches are meant
    assert said([1] * 80, clipped=1) == 0
    assert said([1, 1, 2] * 30, by=1) == 0
    assert said([1, 1, 1, 2] * 20, by=5, optimizers=2) == 0
