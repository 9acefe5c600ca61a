"""One memory as two parameters, frozen tensors that move, and what only looks like it."""

from __future__ import annotations

import torch
from driver import View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.frozen import FrozenMovedProbe, SharedMemoryProbe


def shared(model: nn.Module) -> list[float]:
    watched, optimizer = Watched([SharedMemoryProbe()]), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2, 3):
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model, [optimizer]), optimizer=optimizer)
    return watched.values("params.shared_memory")


def language_model() -> nn.ModuleDict:
    return nn.ModuleDict({"embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})


def test_weights_that_are_tied_by_a_second_parameter_are_counted() -> None:
    model = language_model()
    model["head"].weight = nn.Parameter(model["embedding"].weight)
    assert shared(model) == [1, 1]
    model = language_model()
    model["head"].weight.data = model["embedding"].weight.data
    assert shared(model) == [1, 1]


def test_one_parameter_under_two_names_and_copies_are_not() -> None:
    model = language_model()
    assert shared(model) == [0, 0]
    model["head"].weight = model["embedding"].weight
    assert shared(model) == [0, 0]
    model["head"].weight = nn.Parameter(model["embedding"].weight.detach().clone())
    assert shared(model) == [0, 0]


def test_parts_of_one_flat_memory_are_not() -> None:
    model, flat = nn.Linear(3, 4), torch.randn(16)
    model.weight.data, model.bias.data = flat[:12].view(4, 3), flat[12:]
    assert shared(model) == [0, 0]


def frozen(optimizer: type[torch.optim.Optimizer], *, to_none: bool, **options: float) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    watched, opt = Watched([FrozenMovedProbe()]), optimizer(model.parameters(), lr=0.1, **options)
    before = torch.empty(0)
    for step in range(1, 7):
        if step == 4:
            model[0].requires_grad_(False)
            before = model[0].weight.clone()
        opt.zero_grad(set_to_none=to_none)
        model(torch.randn(5, 3)).square().mean().backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model, [opt]), optimizer=opt)
        opt.step()
    assert watched.values("params.frozen_moved")[:3] == [0, 0, 0]
    moved = not torch.equal(before, model[0].weight)
    value = watched.last("params.frozen_moved")
    assert bool(value) is moved
    return value


def test_tensors_that_were_frozen_and_that_momentum_and_moments_move_are_counted() -> None:
    assert frozen(torch.optim.Adam, to_none=False) == 2
    assert frozen(torch.optim.SGD, to_none=False, momentum=0.9) == 2


def test_tensors_without_a_gradient_and_those_that_a_gradient_of_zero_does_not_move_are_not() -> None:
    assert frozen(torch.optim.Adam, to_none=True) == 0
    assert frozen(torch.optim.SGD, to_none=False) == 0


def test_tensors_that_were_never_trained_are_not() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    watched, opt = Watched([FrozenMovedProbe()]), torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(model, [opt]), optimizer=opt)
    assert watched.values("params.frozen_moved") == [0]


def test_master_weights_whose_gradients_are_written_by_hand_are_not() -> None:
    master = torch.randn(3, 2)
    watched, opt = Watched([FrozenMovedProbe()]), torch.optim.Adam([master])
    for step in (1, 2, 3):
        master.grad = torch.randn(3, 2)
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(nn.Linear(2, 3), [opt]), optimizer=opt)
        opt.step()
    assert watched.values("params.frozen_moved") == [0, 0, 0]
