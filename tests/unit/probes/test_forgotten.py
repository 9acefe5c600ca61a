"""Tensors that were meant to train and are in no optimizer: listed, unfrozen, or the rest of a layer."""

from __future__ import annotations

import torch
from driver import Loop, Watched
from torch import nn

from healthcheck.probes.wiring import ForgottenParameterProbe


class Listed(nn.Module):
    def __init__(self, container: type = list) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        layers = [[nn.Linear(8, 8), torch.relu], nn.Linear(8, 8)]
        self.layers = container(layers) if container is not dict else {"a": layers[0], "b": layers[1]}
        self.alias = [self.first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.layers.values() if isinstance(self.layers, dict) else self.layers
        return two(one[1](one[0](self.first(x))))


def watch(model: nn.Module, params, steps: int = 3, loss=None) -> tuple[Loop, Watched]:
    watched = Watched([ForgottenParameterProbe()])
    loop = Loop(watched, model, torch.optim.SGD(params, lr=0.01))
    loop.run(steps, loss or (lambda: model(torch.randn(4, 8)).pow(2).mean()))
    return loop, watched


def test_layers_in_plain_containers_are_named_with_their_path() -> None:
    for container in (list, tuple, dict):
        model = Listed(container)
        _, watched = watch(model, model.parameters())
        assert watched.last("params.forgotten") == 4
        facts = watched.facts("params.forgotten")
        first = "layers.a.0.weight" if container is dict else "layers.0.0.weight"
        assert facts["which"].startswith(f"{first}, ")
        assert "nn.ModuleList" in facts["why"]


def test_a_list_of_registered_layers_and_a_teacher_that_gets_no_gradient_are_silent() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model.alias, model.teacher = [model[0]], [nn.Linear(8, 2)]

    def loss() -> torch.Tensor:
        x = torch.randn(4, 8)
        with torch.no_grad():
            wanted = model.teacher[0](x)
        return (model(x) - wanted).pow(2).mean()

    _, watched = watch(model, model.parameters(), loss=loss)
    assert set(watched.values("params.forgotten")) == {0.0}


def test_what_is_unfrozen_must_be_given_to_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))
    loop, watched = watch(model, model[1].parameters())
    assert watched.last("params.forgotten") == 0
    model[0].requires_grad_(True)
    loop.run(2, lambda: model(torch.randn(4, 8)).pow(2).mean())
    assert watched.last("params.forgotten") == 2
    assert "unfrozen" in watched.facts("params.forgotten")["why"]
    loop.optimizer.add_param_group({"params": model[0].parameters()})
    loop.run(2, lambda: model(torch.randn(4, 8)).pow(2).mean())
    assert watched.last("params.forgotten") == 0


def test_biases_that_a_filter_lost_are_named_and_training_nothing_else_but_biases_is_silent() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    assert watch(model, weights)[1].last("params.forgotten") == 2
    assert watch(model, biases)[1].last("params.forgotten") == 0


def test_training_a_head_without_freezing_the_rest_is_no_mistake() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    assert watch(model, model[1].parameters())[1].last("params.forgotten") == 0


class Prototypes(nn.Module):
    def __init__(self, prototypes: torch.Tensor) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Linear(8, 8), prototypes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) @ self.prototypes.t()


def test_a_parameter_that_was_calculated_with_before_it_was_kept_is_named() -> None:
    for model, count in (
        (Prototypes(nn.Parameter(torch.randn(8, 5)).t()), 1),
        (Prototypes(nn.Parameter(torch.randn(5, 8).double()).float()), 1),
        (Prototypes(nn.Parameter(torch.randn(5, 8))), 0),
    ):
        _, watched = watch(model, model.parameters())
        assert watched.last("params.forgotten") == count
        assert ("nn.Parameter" in watched.facts("params.forgotten")["why"]) is bool(count)


def test_outputs_and_views_that_a_module_keeps_are_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.view = model[0].weight.t()

    def loss() -> torch.Tensor:
        model.last = model(torch.randn(4, 8))
        return model.last.pow(2).mean()

    _, watched = watch(model, model.parameters(), loss=loss)
    assert set(watched.values("params.forgotten")) == {0.0}
