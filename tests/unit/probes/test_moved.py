"""What an update did, worked out from a few numbers per tensor: the same as from the elements themselves."""

from __future__ import annotations

import math

import pytest
import torch

from healthcheck.device.deferred import DeviceVector
from healthcheck.device.sampling import ROWS
from healthcheck.probes.movement import Moved, Streaks, ratio_of

NEGLIGIBLE = 1e-6


def table(before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor) -> DeviceVector:
    """What the device sums up, one row of elements per tensor."""
    delta = after - before
    active = gradient.isfinite() & (gradient != 0)
    rows = [
        delta.square().sum(1), before.square().sum(1), (delta != 0).sum(1), active.sum(1),
        (active & (delta == 0)).sum(1), torch.where(active, gradient.abs(), 0.0).amax(1),
    ]  # fmt: skip
    assert len(rows) == ROWS
    return DeviceVector(torch.stack([row.double() for row in rows]).flatten())


def test_ratio_weighs_each_tensor_by_what_its_elements_stand_for() -> None:
    old, new = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[3.0, 5.0], [1.0, 2.0]])
    moved = Moved([table(old, new, torch.ones(2, 2))], [[0, 1]])
    assert moved.ratio([[10.0, 1.0]]).value() == pytest.approx(math.sqrt((10 * 1 + 4) / (10 * 25 + 1)))
    assert [(index, ratio.value()) for index, ratio in moved.each_ratio()] == [(0, pytest.approx(0.2)), (1, 2.0)]
    assert ratio_of(0.0, 0.0) == 0.0
    assert ratio_of(5.0, 0.0) == 1.0
    assert ratio_of(math.inf, 1.0) == math.inf
    assert math.isnan(ratio_of(math.nan, math.nan))
    assert math.isnan(ratio_of(math.inf, math.inf))


def test_lost_counts_only_elements_with_something_to_apply_in_the_tensors_that_count() -> None:
    old = torch.zeros(2, 4)
    new = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    gradient = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    moved = Moved([table(old, new, gradient)], [[0, 1]])
    assert moved.lost([True, False]).value() == pytest.approx(2 / 3)
    assert moved.lost([True, True]).value() == pytest.approx(6 / 7)
    assert moved.lost([False, False]).value() is None, "nothing to lose is not a share of 0"


def test_a_tensor_stands_still_only_where_there_was_something_to_apply() -> None:
    still, moves = torch.ones(5, 2), torch.ones(5, 2)
    moves[0] += 1
    gradient = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1e-9, 0.0], [math.nan, 0.0]])
    streaks = Streaks(5, NEGLIGIBLE)
    for _ in range(3):
        streaks.add(Moved([table(still, moves, gradient)], [[0, 1, 2, 3, 4]]), [False] * 5, [True] * 5)
    count, which = streaks.standing(3)
    assert count.value() == 1.0
    assert which() == [1]
    streaks.add(Moved([table(still, still + 1, gradient)], [[0, 1, 2, 3, 4]]), [False] * 5, [True] * 5)
    assert streaks.standing(1)[0].value() == 0.0


def test_without_a_gradient_a_tensor_counts_and_with_a_faded_rate_it_does_not() -> None:
    still, none = torch.ones(2, 2), torch.zeros(2, 2)
    streaks = Streaks(2, NEGLIGIBLE)
    streaks.add(Moved([table(still, still, none)], [[0, 1]]), [True, True], [True, False])
    assert streaks.standing(1)[0].value() == 1.0
