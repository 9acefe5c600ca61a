"""Two optimizers with the same tensors, and a model that has none; and loops in which either is meant so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.untrained_parameters import WrongParametersProbe

Optimizers = Sequence[torch.optim.Optimizer]


def found(
    build: Callable[[nn.Module, nn.Module], Optimizers], *, clear: bool = False, fixed: nn.Module | None = None
) -> list[float]:
    """A front model feeds a back model; each optimizer steps once a step, as in a game."""
    front, back = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(2, 1)
    optimizers = build(front, back)
    watched = Watched([WrongParametersProbe()])
    for step in range(1, 5):
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            if clear:
                front.zero_grad()
            out = back(front(torch.randn(8, 4)))
            F.mse_loss(fixed(out) if fixed is not None else out, torch.ones(8, 1)).backward()
            watched.emit(
                EventKind.BEFORE_UPDATE,
                step,
                model=View(back, optimizers),
                optimizer=optimizer,
                optimizer_index=index,
            )
            optimizer.step()
    return watched.values("params.wrong_optimizer")


def adam(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(chain(*(part.parameters() for part in parts)), lr=1e-3)


@pytest.mark.parametrize("clear", [False, True])
def test_a_model_whose_optimizer_holds_another_one_is_counted_from_the_second_look(clear: bool) -> None:
    assert found(lambda front, back: [adam(back), adam(back)], clear=clear) == [0, 4, 4, 4]
    assert found(lambda front, back: [adam(back), torch.optim.SGD([back.weight], 0.1)], clear=clear)[1:] == [4, 4, 4]


def test_so_is_one_among_three() -> None:
    other = nn.Linear(1, 1)
    assert found(lambda front, back: [adam(back), adam(other), adam(back)], fixed=other)[-3:] == [4, 4, 4]


HEALTHY: dict[str, Callable[[nn.Module, nn.Module], Optimizers]] = {
    "each has its own": lambda front, back: [adam(front), adam(back)],
    "two objectives for one model": lambda front, back: [adam(front, back), adam(front)],
    "one optimizer and a fixed network behind it": lambda front, back: [adam(front)],
}


@pytest.mark.parametrize("case", HEALTHY)
def test_models_with_an_optimizer_of_their_own_are_not(case: str) -> None:
    assert set(found(HEALTHY[case])) <= {0.0}


def test_a_fixed_network_in_eval_mode_beside_two_objectives_is_not() -> None:
    fixed = nn.Linear(1, 1).eval()
    assert set(found(lambda front, back: [adam(front, back), adam(front)], fixed=fixed)) == {0.0}


def test_a_switch_to_another_optimizer_is_not() -> None:
    model, watched = nn.Linear(2, 1), Watched([WrongParametersProbe()])
    stranger = nn.Linear(1, 1)
    both = [adam(model), torch.optim.SGD(model.parameters(), 0.1)]
    for step in range(1, 41):
        index = int(step > 20)
        optimizer = both[index]
        stranger(model(torch.randn(4, 2))).sum().backward()
        if step % 10 == 0:
            watched.emit(
                EventKind.BEFORE_UPDATE, step, model=View(model, both), optimizer=optimizer, optimizer_index=index
            )
    assert watched.values("params.wrong_optimizer")[-1] == 0
