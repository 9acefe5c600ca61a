"""Optimizers of which nothing is trainable, and frozen normalisation that moves on; and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from driver import View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.frozen import FrozenProbe


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def watch(
    model: nn.Sequential, *optimizers: torch.optim.Optimizer, mode: Callable[[nn.Sequential], object] = nn.Module.train
) -> Watched:
    watched = Watched([FrozenProbe()])
    for step in range(1, 4):
        mode(model)
        loss = model(torch.randn(8, 4)).square().mean()
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            if loss.requires_grad:
                loss.backward(retain_graph=True)
            view = View(model, optimizers)
            watched.emit(EventKind.BEFORE_UPDATE, step, model=view, optimizer=optimizer, optimizer_index=index)
            optimizer.step()
    return watched


def sgd(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01)


def all_frozen(model: nn.Sequential, *optimizers: torch.optim.Optimizer) -> list[float]:
    return watch(model, *optimizers).values("optimizer.all_frozen")


def test_an_optimizer_whose_tensors_were_frozen_after_it_was_built_is_counted() -> None:
    model = model_of()
    optimizer = sgd(model[3])
    model[3].requires_grad_(False)
    assert all_frozen(model, optimizer) == [2, 2, 2]


def test_one_that_trains_something_or_waits_beside_another_is_not() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    assert all_frozen(model, sgd(model)) == [0, 0, 0]
    assert all_frozen(model, sgd(model[0]), sgd(model[3])) == [0, 0, 0]


def test_gradients_that_are_written_by_hand_are_not() -> None:
    model = model_of().requires_grad_(False)
    watched, optimizer = Watched([FrozenProbe()]), sgd(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(model), optimizer=optimizer)
    assert watched.values("optimizer.all_frozen") == [0]


def norms(model: nn.Sequential, mode: Callable[[nn.Sequential], object] = nn.Module.train) -> list[float]:
    return watch(model, sgd(model), mode=mode).values("modules.frozen_norms")


def frozen_stage() -> nn.Sequential:
    model = model_of()
    for part in model[:3]:
        part.requires_grad_(False)
    return model


def test_statistics_of_a_frozen_layer_that_move_are_counted() -> None:
    assert norms(frozen_stage()) == [1, 1]


def only_the_head(model: nn.Sequential) -> None:
    model.eval()
    model[3].train()


def test_frozen_layers_in_eval_mode_and_layers_that_train_or_have_nothing_to_freeze_are_not() -> None:
    assert norms(frozen_stage(), only_the_head) == [0, 0]
    assert norms(model_of()) == []
    plain = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))
    assert norms(plain) == []


def test_a_second_training_whose_first_optimizer_is_kept_is_looked_at() -> None:
    first, second = model_of(), model_of()
    optimizers = [sgd(first), sgd(second)]
    second.requires_grad_(False)
    watched = Watched([FrozenProbe()])
    for step in (*range(1, 30), *range(130, 190)):
        which = int(step >= 130)
        view = View(second if which else first, optimizers)
        watched.emit(EventKind.BEFORE_UPDATE, step, model=view, optimizer=optimizers[which], optimizer_index=which)
    assert watched.of("optimizer.all_frozen")[0] == (1, 0)
    assert watched.last("optimizer.all_frozen") == 6
