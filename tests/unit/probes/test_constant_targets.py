"""Targets that are all one number, and losses in which that is right."""

from __future__ import annotations

import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.output_range import ConstantTargetProbe, sole_targets

NET = nn.Linear(4, 1)
X = torch.randn(16, 4)
ZEROS = torch.zeros(16, 1)


def counted(*targets: torch.Tensor) -> list[float]:
    watched = Watched([ConstantTargetProbe()])
    for step, y in enumerate(targets, start=1):
        loss = F.mse_loss(NET(X), y)
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
    return watched.values("targets.constant")


def test_targets_of_one_number_are_counted_and_others_are_not() -> None:
    assert counted(ZEROS, ZEROS, ZEROS) == [16, 32, 48]
    assert counted(ZEROS, ZEROS + 1, ZEROS) == [16, 0, 0]
    assert counted(torch.randn(16, 1)) == [0]


def test_a_residual_a_penalty_and_one_term_of_several_have_no_targets() -> None:
    y = torch.randn(16, 1)
    assert sole_targets(F.mse_loss(NET(X) - y, ZEROS).grad_fn) is None
    assert sole_targets((F.mse_loss(NET(X), y) + F.mse_loss(NET(X), ZEROS)).grad_fn) is None
    assert sole_targets((F.mse_loss(NET(X), ZEROS) + NET(X).abs().mean()).grad_fn) is None
    assert sole_targets(F.mse_loss(NET(X), y).grad_fn) is not None
    assert sole_targets(F.binary_cross_entropy_with_logits(NET(X), ZEROS).grad_fn) is not None
