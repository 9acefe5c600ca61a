"""Layers that run along the batch: told from the rows of the loss, and only where these leave no doubt."""

from __future__ import annotations

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.activations import LOOKS, BatchLayoutProbe

B, T, D = 6, 5, 8


class Reader(nn.Module):
    """Reads (B, T, D); gives one answer per sample."""

    def __init__(self, layer: nn.Module, turned: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.turned = layer, nn.Linear(D, 3), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.transpose(0, 1) if self.turned else x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head((x.transpose(0, 1) if self.turned else x).mean(1))


def mixing(model: Reader, loss, batch: int = B, time: int = T) -> list[float]:
    watched = Watched([BatchLayoutProbe()])
    for step in range(1, LOOKS + 3):
        value = loss(model(torch.randn(batch, time, D)))
        watched.emit(EventKind.LOSS, step, model=View(model), loss=value.detach(), loss_graph=value.grad_fn)
        value.backward()
    assert not model.layer._forward_hooks
    return watched.values("layers.mixing")


def classes(z: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long))


LAYERS = {
    "a recurrent layer": lambda **o: nn.GRU(D, D, **o),
    "an encoder": lambda **o: nn.TransformerEncoderLayer(D, 2, 16, **o),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_takes_the_batch_for_time_is_counted(case: str) -> None:
    build = LAYERS[case]
    assert mixing(Reader(build()), classes) == [1.0]
    assert mixing(Reader(build()), lambda z: F.mse_loss(z, torch.zeros_like(z))) == [1.0]
    assert mixing(Reader(build(), turned=True), classes) == [0.0]
    assert mixing(Reader(build(batch_first=True)), classes) == []


def test_shapes_that_leave_a_doubt_are_no_mistake() -> None:
    assert mixing(Reader(nn.GRU(D, D)), classes, time=B) == [0.0]
    assert mixing(Reader(nn.GRU(D, D)), classes, time=1) == [0.0]  # a sequence of one batch, a tag for each


class EachStep(Reader):
    """Reads (T, B, D) as its layer wants it; gives one number per time and sample, of shape (T, B)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])[..., 0]


def test_an_answer_for_each_time_and_sample_is_no_mistake() -> None:
    assert mixing(EachStep(nn.LSTM(D, D)), lambda z: F.mse_loss(z, torch.zeros_like(z))) == [0.0]
