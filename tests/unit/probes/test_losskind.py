"""What sort of loss it is, read from torch's own graph of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.loss_construction import LossKindProbe

N = 16
ACTIONS = torch.arange(N) % 6
RETURNS = torch.linspace(-2, 3, N)
OLD = torch.full((N,), -1.5)


def found(build: Callable[[torch.Tensor], torch.Tensor], losses: int = 3) -> list[tuple[str, float]]:
    watched = Watched([LossKindProbe()])
    layer = nn.Linear(4, 6)
    for step in range(1, losses + 1):
        loss = build(layer(torch.randn(N, 4)))
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
    return [(s.metric, s.value) for s in watched.samples]


def picked(z: torch.Tensor) -> torch.Tensor:
    return z.gather(1, ACTIONS[:, None]).squeeze(1)


def ratio(z: torch.Tensor) -> torch.Tensor:
    return (Categorical(logits=z).log_prob(ACTIONS) - OLD).exp()


VALUES = {
    "mse": lambda z: F.mse_loss(picked(z), RETURNS),
    "huber, by index": lambda z: F.huber_loss(z[torch.arange(N), ACTIONS], RETURNS),
    "written out": lambda z: (RETURNS - picked(z)).pow(2).mean(),
}
POLICIES = {
    "with entropy": lambda z: -(Categorical(logits=z).log_prob(ACTIONS) * RETURNS).mean() - Categorical(logits=z).entropy().mean(),
    "of probabilities": lambda z: -(RETURNS * Categorical(probs=z.softmax(1)).log_prob(ACTIONS)).sum(),
    "log softmax": lambda z: -(picked(z.log_softmax(1)) * RETURNS).mean(),
    "ppo": lambda z: -torch.min(ratio(z) * RETURNS, ratio(z).clamp(0.8, 1.2) * RETURNS).mean() + z.pow(2).mean(),
    "continuous": lambda z: -(Normal(z, torch.ones(6)).log_prob(torch.zeros(N, 6)).sum(-1) * RETURNS).mean(),
}  # fmt: skip
HINGES = {
    "triplet": lambda z: F.triplet_margin_loss(z, z + 0.1, torch.randn(N, 6)),
    "clamp": lambda z: (1 - RETURNS * z[:, 0]).clamp(min=0).mean(),
    "squared hinge": lambda z: F.relu(1 - RETURNS * z[:, 0]).pow(2).mean(),
    "classes": lambda z: F.multi_margin_loss(z, ACTIONS),
}
NEITHER = {
    "cross entropy": lambda z: F.cross_entropy(z, ACTIONS),
    "tokens that are masked": lambda z: -(picked(z.log_softmax(1)) * (ACTIONS > 2)).sum(),
    "tokens with weights": lambda z: -(picked(z.log_softmax(1)) * torch.linspace(0.1, 1, N)).sum(),
    "focal loss": lambda z: -((1 - picked(z.log_softmax(1)).exp()) ** 2 * picked(z.log_softmax(1))).mean(),
    "some values": lambda z: F.mse_loss(z[z > 0], torch.zeros(1).expand(int((z > 0).sum()))),
    "some rows": lambda z: F.mse_loss(z[torch.arange(5)], torch.zeros(5, 6)),
    "a Gaussian": lambda z: F.gaussian_nll_loss(z[:, 0], RETURNS, z[:, 1].exp()),
    "a ReLU behind the last layer": lambda z: F.mse_loss(z.relu(), torch.zeros(N, 6)),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_of_chosen_actions_are_told_once(case: str) -> None:
    assert found(VALUES[case]) == [("loss.of_actions", 2.0)]


@pytest.mark.parametrize("case", POLICIES)
def test_log_probabilities_weighted_by_returns_are_told(case: str) -> None:
    assert found(POLICIES[case]) == [("loss.of_actions", 1.0)]


@pytest.mark.parametrize("case", HINGES)
def test_a_margin_is_told(case: str) -> None:
    assert found(HINGES[case]) == [("loss.hinged", 1.0)]


@pytest.mark.parametrize("case", NEITHER)
def test_other_losses_have_no_value(case: str) -> None:
    assert found(NEITHER[case], losses=25) == []
