"""Weights before the first update, their size since then, and what the optimizer remembers of them."""

from __future__ import annotations

import math

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.movement import RestoredWeightProbe
from healthcheck.probes.weights import InitialWeightProbe, OptimizerStateProbe, WeightGrowthProbe


def initial(model: nn.Module, step: int = 1) -> Watched:
    watched = Watched([InitialWeightProbe()])
    watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model))
    return watched


def network(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def test_usual_initial_values_are_uneven_by_little_and_alike_nowhere() -> None:
    watched = initial(network())
    assert watched.last("init.alike") == 0
    assert 0.3 < watched.last("init.gain") < 1
    assert watched.last("init.gain_ratio") < 2


def test_constant_layers_are_alike_and_unit_normals_are_large() -> None:
    model = network()
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.constant_(model[2].weight, 0.1)
    nn.init.normal_(model[4].weight)
    watched = initial(model)
    assert watched.last("init.alike") == 2
    assert watched.facts("init.alike")["which"] == "0, 2"
    assert watched.last("init.gain") == pytest.approx(8, rel=0.2)
    assert watched.facts("init.gain")["which"].startswith("4, gain")


def test_adapters_at_zero_frozen_layers_depthwise_kernels_and_shared_embeddings_are_left_out() -> None:
    embedding, head = nn.Embedding(30, 64), nn.Linear(64, 30, bias=False)
    head.weight = embedding.weight  # a normal distribution of size 1, and not a linear layer's choice
    adapter, frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
    nn.init.zeros_(adapter.weight)
    nn.init.ones_(frozen.weight)
    depthwise = nn.Conv2d(8, 8, 1, groups=8)
    nn.init.ones_(depthwise.weight)
    watched = initial(nn.Sequential(embedding, adapter, frozen, depthwise, head))
    assert watched.last("init.alike") == 0
    assert watched.last("init.gain") == 0


def test_a_run_that_goes_on_has_no_beginning() -> None:
    assert initial(network(), step=500).samples == []


def test_growth_is_measured_against_the_first_update() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watched = Watched([WeightGrowthProbe()], Everything(every=5))
    loop = Loop(watched, model, optimizer)
    loop.run(5, lambda: model(torch.ones(2, 8)).sum())
    with torch.no_grad():
        model.weight.mul_(4.0)
    loop.run(5, lambda: model(torch.ones(2, 8)).sum())
    assert watched.of("params.growth") == [(5, pytest.approx(1.0)), (10, pytest.approx(4.0))]


def test_weights_that_begin_far_below_the_usual_size_grow_only_past_it() -> None:
    model = nn.Embedding(50, 12)
    nn.init.constant_(model.weight, 0.01)
    watched = Watched([WeightGrowthProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0))

    def scaled(factor: float) -> float:
        with torch.no_grad():
            model.weight.mul_(factor)
        loop.run(1, lambda: model(torch.arange(4)).sum())
        return watched.last("params.growth")

    loop.run(1, lambda: model(torch.arange(4)).sum())
    usual = (1 / 36) ** 0.5
    assert watched.of("init.size") == [(1, pytest.approx(0.01 / usual, rel=0.01))]
    assert [scaled(factor) for factor in (10, 10, 0.001)] == pytest.approx([1.0, 1.0 / usual, 0.1], rel=0.01)


def test_an_optimizer_of_biases_alone_is_measured_too_and_zeros_are_not() -> None:
    bias = nn.Parameter(torch.zeros(4))
    watched = Watched([WeightGrowthProbe()])
    Loop(watched, None, torch.optim.SGD([bias], lr=0.1)).run(3, lambda: (bias - 1).square().sum())
    assert watched.of("init.size") == [(1, 1.0)]
    assert watched.names() == {"init.size"}


def test_moments_that_are_not_finite_are_counted_when_due_and_at_a_checkpoint() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watched = Watched([OptimizerStateProbe()], Everything(every=5))
    loop = Loop(watched, model, optimizer)
    loop.run(5, lambda: model(torch.randn(8, 4)).square().mean())
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = math.inf
    watched.emit(EventKind.CHECKPOINT_SAVED, 5, model=loop.view)
    assert watched.of("optimizer.nonfinite") == [(5, 0.0), (5, 1.0)]
    facts = watched.facts("optimizer.nonfinite")
    assert facts == {"which": "exp_avg_sq of weight", "tensors": "1 of 4 state tensors not finite"}


def test_an_optimizer_without_state_says_nothing() -> None:
    model = nn.Linear(4, 2)
    watched = Watched([OptimizerStateProbe()])
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(3, lambda: model(torch.randn(8, 4)).mean())
    assert watched.samples == []


def restored(put_back, every: int = 2) -> list[tuple[int, float]]:
    """What the probe says of a loop that does something to its model after each update."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched([RestoredWeightProbe()], Everything(every=every))
    loop = Loop(watched, model, optimizer)
    first = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(6):
        loop.one(lambda: model(torch.randn(4, 8)).square().mean())
        put_back(model, first)
    return watched.of("params.restored")


def test_weights_that_are_put_back_after_each_update_are_counted() -> None:
    assert restored(lambda model, first: model.load_state_dict(first)) == [(3, 1.0), (5, 1.0)]


def test_weights_that_stay_where_the_update_took_them_are_not() -> None:
    assert restored(lambda model, first: None) == [(3, 0.0), (5, 0.0)]


def test_weights_of_which_a_clamp_holds_some_at_its_bounds_are_not() -> None:
    """As in a Wasserstein critic: the others get no gradient, or go on by themselves."""
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight[:4] = 0.1
        model.weight[4:].mul_(0.1)
    watched = Watched([RestoredWeightProbe()], Everything(every=2))
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        loop.one(lambda: -model.weight[:4].sum())
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
    assert {value for _, value in watched.of("params.restored")} == {0.0}


def test_weights_that_a_clamp_holds_at_its_bound_are_not() -> None:
    def clamp(model: nn.Module, first: object) -> None:
        with torch.no_grad():
            model.weight.copy_(model.weight.sign() * 0.1)

    assert {value for _, value in restored(clamp)} == {0.0}
