"""Rows of a batch that are all the same, and the first state of a recurrent layer, which is nothing but zeros."""

from __future__ import annotations

import pytest
import torch
from driver import Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.data_scale import ROWS, InputProbe


def judged(out: torch.Tensor, batch: torch.Tensor) -> float:
    watched = Watched([InputProbe()])
    loss = out.pow(2).mean()
    watched.emit(EventKind.LOSS, 1, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train", batch=batch)
    return watched.last("inputs.same_rows")


def test_one_row_again_and_again_is_told_and_several_are_not() -> None:
    rows = torch.randn(ROWS, 6)
    assert judged(nn.Linear(6, 2)(rows[:1].repeat(ROWS, 1)), rows) == 1
    assert judged(nn.Linear(6, 2)(rows), rows) == 0


@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_the_first_state_of_a_recurrent_layer_is_no_row(layer: type[nn.Module]) -> None:
    tokens = torch.randint(0, 9, (5, ROWS))
    assert judged(layer(4, 8)(nn.Embedding(9, 4)(tokens))[0], tokens) == 0


def said(rows: list[torch.Tensor], wanted: torch.Tensor, layer: nn.Module) -> float:
    watched = Watched([InputProbe()])
    for step, row in enumerate(rows, 1):
        loss = nn.functional.mse_loss(layer(row), wanted)
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
    return watched.last("inputs.same_rows")


def test_without_a_loader_rows_must_be_asked_for_different_numbers_and_change_from_look_to_look() -> None:
    layer, wanted = nn.Linear(4, 1), torch.randn(ROWS, 1)
    copies = [torch.eye(4)[at : at + 1].repeat(ROWS, 1) for at in range(3)]
    assert said(copies, wanted, layer) == 1
    assert said([torch.randn(ROWS, 4) for _ in copies], wanted, layer) == 0
    assert said([copies[0]] * 3, wanted, layer) == 0  # a constant of the model's, as of a bandit
    assert said(copies, torch.ones(ROWS, 1), layer) == 0
