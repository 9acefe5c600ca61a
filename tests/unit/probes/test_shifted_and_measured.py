"""Critics and penalties: biases that a loss cannot feel, and lengths that compare no vectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Everything, Loop, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.device.deferred import DeviceVector
from healthcheck.probes.gradient_statistics import GradientStats
from healthcheck.probes.gradients import GradientFacts, GradientProbe
from healthcheck.probes.predictions import PredictionProbe

N = 32
REAL, FAKE = torch.rand(N, 6) + 1.0, torch.rand(N, 6) + 2.0


def critic() -> nn.Sequential:
    """Every unit is active for every input: the sums of both halves of the loss cancel in all biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.abs_()
    return model


SHIFTED: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "difference of means": lambda m: m(FAKE).mean() - m(REAL).mean(),
    "pairs ranked": lambda m: torch.relu(m(REAL) - m(FAKE) + 100.0).sum(),
    "squared distance": lambda m: (m(REAL) - m(FAKE)).square().mean(),
}


@pytest.mark.parametrize("loss", SHIFTED.values(), ids=SHIFTED.keys())
def test_biases_that_cancel_in_a_loss_are_not_dead(loss: Callable[[nn.Module], torch.Tensor]) -> None:
    model, watched = critic(), Watched([GradientProbe()], Everything({"grad_norm", "grads.zero"}))
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0)).one(lambda: loss(model))
    assert model[2].bias.grad.abs().max() == model[0].bias.grad.abs().max() == 0
    assert watched.last("grads.zero") == 0


def test_a_dead_layer_counts_with_its_bias() -> None:
    model, watched = critic(), Watched([GradientProbe()], Everything({"grad_norm", "grads.zero"}))
    model[1] = nn.ReLU()
    nn.init.constant_(model[0].bias, -1000.0)
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0)).one(lambda: model(REAL).mean())
    assert watched.facts("grads.zero")["which"] == "0.weight, 0.bias, 2.weight"
    assert watched.last("grads.zero") == 3


def test_statistics_of_a_device_count_alike() -> None:
    names = ["a.weight", "a.bias", "b.weight", "b.bias", "scale", "rnn.weight_hh_l0", "rnn.bias_hh_l0"]
    norms = [0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0]
    numbers = torch.tensor([0.7, *norms])
    facts = GradientFacts(GradientStats(range(7), DeviceVector(numbers)), names)
    assert facts.zero_count(numbers.tolist()) == 3
    assert facts.zero() == {"which": "a.weight, a.bias, scale", "tensors": "3 of 7 gradients exactly zero"}


def embeddings(loss: torch.Tensor) -> dict[str, list]:
    watched = Watched([PredictionProbe()], Everything({"embeddings.spread"}))
    watched.emit(EventKind.LOSS, 1, loss=loss.detach(), loss_graph=loss.grad_fn)
    return {name: watched.of(name) for name in watched.names()}


def gradient_penalty() -> torch.Tensor:
    x = REAL.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic()(x).sum(), x, create_graph=True)
    return ((gradient.view(N, -1).norm(2, dim=1) - 1) ** 2).mean()


LENGTHS: dict[str, Callable[[], torch.Tensor]] = {
    "gradient penalty": gradient_penalty,
    "lengths of capsules": lambda: F.relu(0.9 - nn.Linear(6, 8)(REAL).norm(dim=1)).square().mean(),
    "length as a penalty": lambda: torch.linalg.vector_norm(nn.Linear(6, 8)(REAL), dim=1).mean(),
}


@pytest.mark.parametrize("loss", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_length_by_itself_compares_no_vectors(loss: Callable[[], torch.Tensor]) -> None:
    assert embeddings(loss()) == {}


@pytest.mark.parametrize(
    "compare",
    [F.pairwise_distance, lambda a, b: (a - b).norm(dim=1), lambda a, b: torch.linalg.norm(b - a, dim=1)],
    ids=["pairwise_distance", "norm of the difference", "linalg"],
)
def test_the_length_of_a_difference_does(compare: Callable[..., torch.Tensor]) -> None:
    one, other = (nn.Linear(6, 8)(x) for x in (REAL, FAKE))
    assert embeddings(compare(one, other).mean())["embeddings.spread"][0][1] > 0.001
