"""State that one batch leaves to another, and answers read at the last step of both directions, beside what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from healthcheck.core.events import EventKind
from healthcheck.probes.recurrent import CarriedStateProbe, half_read

ROWS = TensorDataset(torch.randn(24, 5, 3))
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def detached(state: object) -> object:
    return tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()  # type: ignore[attr-defined]


def carried(layer: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], *, keep: bool) -> list[float]:
    watched, probe, state = Watched([]), CarriedStateProbe(), None
    watched.probes = [probe]
    watched.run.places.note(loader, "train.py:3")
    for step, (x,) in enumerate(loader, start=1):
        output = layer(x if hasattr(layer, "num_layers") else x[:, 0], state)
        new = output[1] if hasattr(layer, "num_layers") else output
        loss = (output[0] if isinstance(output, tuple) else output).mean()
        watched.emit(EventKind.LOSS, step, model=View(layer), batch=(x,), loss_graph=loss.grad_fn, phase="train")
        state = detached(new) if keep else None
    assert not layer._forward_hooks
    return watched.values("layers.carried_state")


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_a_state_that_goes_to_rows_drawn_at_random_is_counted(make: Callable[..., nn.Module]) -> None:
    layer = make(3, 4, batch_first=True) if make in (nn.LSTM, nn.GRU) else make(3, 4)
    assert carried(layer, DataLoader(ROWS, 2, shuffle=True), keep=True) == [1]


def test_rows_in_order_and_states_made_anew_are_not() -> None:
    layer = nn.LSTM(3, 4, batch_first=True)
    assert carried(layer, DataLoader(ROWS, 2, shuffle=False), keep=True) == []
    assert carried(layer, DataLoader(ROWS, 2, shuffle=True), keep=False) == [0]


H = 4


def read(layer: nn.RNNBase, how: str) -> list[str]:
    x = torch.randn(6, 5, 3)
    output, state = layer(x)
    h = state[0] if isinstance(state, tuple) else state
    answer = {
        "the last step": lambda: output[:, -1],
        "the last step behind dropout": lambda: nn.functional.dropout(output)[:, -1],
        "both last states": lambda: torch.cat([h[-2], h[-1]], 1),
        "each half where it ends": lambda: torch.cat([output[:, -1, :H], output[:, 0, H:]], 1),
        "a mean over the steps": lambda: output.mean(1),
        "the first step": lambda: output[:, 0],
        "the last step beside the mean": lambda: output[:, -1] + output.mean(1),
    }[how]()
    return list(half_read(answer.square().mean().grad_fn))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how", ["the last step", "the last step behind dropout"])
def test_the_last_step_of_both_directions_is_named(name: str, how: str) -> None:
    layer = LAYERS[name](3, H, batch_first=True, bidirectional=True)
    assert read(layer, how)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "how",
    ["both last states", "each half where it ends", "a mean over the steps", "the first step", "the last step beside the mean"],
)  # fmt: skip
def test_what_both_directions_have_read_is_not(name: str, how: str) -> None:
    assert read(LAYERS[name](3, H, batch_first=True, bidirectional=True), how) == []


@pytest.mark.parametrize("name", LAYERS)
def test_the_last_step_of_one_direction_is_not(name: str) -> None:
    assert read(LAYERS[name](3, H, batch_first=True), "the last step") == []
