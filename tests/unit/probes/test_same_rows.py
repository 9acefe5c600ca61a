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
