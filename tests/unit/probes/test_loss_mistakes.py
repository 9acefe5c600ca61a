"""Mistakes in the shapes of a loss and in which of its parts carry gradients, each beside what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from healthcheck.probes.loss_mistakes import gradient_mistakes, shape_mistakes
from healthcheck.probes.output_range import _outside
from healthcheck.probes.untrained_parameters import _behind_trained

N = 16
Make = Callable[[], torch.Tensor]


def layer(given: int, made: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(given, made)


X = torch.randn(N, 4)
Y = torch.arange(N) % 8
A = torch.randint(0, 3, (N, 1))
R = torch.randn(N)
TOKENS = torch.randn(4, 7, 5)
TAGS = torch.randint(0, 6, (4, 7))


def scores() -> torch.Tensor:
    return layer(5, 6)(TOKENS)


def maps() -> torch.Tensor:
    return nn.Conv1d(4, 8, 1)(torch.randn(20, 4, 16))


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    net = layer(4, 8)
    return F.normalize(net(X), dim=1), F.normalize(net(X + 0.1), dim=1)


def similarities(targets: torch.Tensor) -> torch.Tensor:
    one, other = pairs()
    return F.cross_entropy(one @ other.T / 0.1, targets)


SHAPES: dict[str, tuple[Make, str]] = {
    "a softmax over one value": (
        lambda: F.binary_cross_entropy(layer(4, 1)(X).softmax(1), torch.ones(N, 1)),
        "one value",
    ),
    "a cross entropy of one value": (lambda: F.cross_entropy(layer(4, 1)(X), torch.zeros(N).long()), "one value"),
    "over time, flattened": (
        lambda: F.nll_loss(scores().log_softmax(1).view(-1, 6), TAGS.view(-1)),
        "classes are dimension 2",
    ),
    "over time, transposed": (
        lambda: F.nll_loss(scores().log_softmax(1).transpose(1, 2), TAGS),
        "classes are dimension 2",
    ),
    "a view of (batch, classes, time)": (
        lambda: F.cross_entropy(maps().view(-1, 8), torch.randint(0, 8, (320,))),
        "transpose",
    ),
    "similarities with one target": (lambda: similarities(torch.zeros(N).long()), "diagonal"),
    "dropout on the logits": (lambda: F.cross_entropy(F.dropout(layer(4, 8)(X), 0.5), Y), "dropout"),
}
SHAPES_RIGHT: dict[str, Make] = {
    "cross entropy": lambda: F.cross_entropy(layer(4, 8)(X), Y),
    "log softmax over the last dimension": lambda: F.nll_loss(scores().log_softmax(-1).view(-1, 6), TAGS.view(-1)),
    "transposed logits": lambda: F.cross_entropy(scores().transpose(1, 2), TAGS),
    "permuted logits": lambda: F.cross_entropy(scores().permute(0, 2, 1), TAGS),
    "transposed after the softmax": lambda: F.nll_loss(scores().log_softmax(2).transpose(1, 2), TAGS),
    "classes moved to the end": lambda: F.cross_entropy(
        maps().transpose(1, 2).reshape(-1, 8), torch.randint(0, 8, (320,))
    ),
    "one position for each picture": lambda: F.cross_entropy(
        nn.Conv1d(4, 8, 16)(torch.randn(20, 4, 16)).view(-1, 8), torch.randint(0, 8, (20,))
    ),
    "similarities with the diagonal": lambda: similarities(torch.arange(N)),
    "a queue of negatives, all targets 0": lambda: F.cross_entropy(
        torch.cat([(pairs()[0] * pairs()[1]).sum(1, keepdim=True), pairs()[0] @ torch.randn(8, 40)], 1),
        torch.zeros(N).long(),
    ),
    "weights of classes": lambda: F.cross_entropy(layer(4, 8)(X) * torch.linspace(0.5, 2, 8), Y),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_mistake_in_the_shapes_is_named(case: str) -> None:
    make, words = SHAPES[case]
    assert any(words in said for said in shape_mistakes(make().grad_fn))


@pytest.mark.parametrize("case", SHAPES_RIGHT)
def test_right_shapes_are_silent(case: str) -> None:
    assert list(shape_mistakes(SHAPES_RIGHT[case]().grad_fn)) == []


def actor_critic(*, detached: bool, ratio: bool = False) -> torch.Tensor:
    policy, value = layer(4, 3), layer(4, 1)
    chosen = torch.distributions.Categorical(logits=policy(X))
    values = value(X).squeeze(1)
    advantages = R - (values.detach() if detached else values)
    log = chosen.log_prob(A[:, 0])
    if ratio:
        moved = (log - log.detach()).exp()
        return -torch.min(moved * advantages, moved.clamp(0.8, 1.2) * advantages).mean()
    return -(log * advantages).mean() + (R - values).pow(2).mean() - 0.01 * chosen.entropy().mean()


def td(*, detached: bool) -> torch.Tensor:
    q = layer(4, 3)
    targets = R + 0.9 * q(X + 1).max(1).values
    return F.smooth_l1_loss(q(X).gather(1, A).squeeze(1), targets.detach() if detached else targets)


def two_branches(*, detached: bool) -> torch.Tensor:
    net, head = layer(4, 6), layer(6, 6)
    one, other = net(X), net(X + 0.1)
    kept = other.detach() if detached else other
    return -F.cosine_similarity(head(one), kept, dim=-1).mean()


def margin() -> torch.Tensor:
    logits = layer(4, 8)(X)
    return (logits.logsumexp(1) - logits.gather(1, Y[:, None])[:, 0]).mean()


def equation() -> torch.Tensor:
    net, x = layer(4, 1), X.clone().requires_grad_()
    u = net(x).tanh()
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope[:, 0] - u[:, 0]).pow(2).mean()


def spread_out() -> torch.Tensor:
    one, other = pairs()
    return F.mse_loss(one, other) + torch.relu(1 - one.std(0)).mean()


UNDETACHED: dict[str, Make] = {
    "advantages": lambda: actor_critic(detached=False),
    "advantages of a ratio": lambda: actor_critic(detached=False, ratio=True),
    "targets of a Q-function": lambda: td(detached=False),
    "both branches": lambda: two_branches(detached=False),
    "nothing but a distance of two outputs": lambda: F.mse_loss(*pairs()),
}
DETACHED: dict[str, Make] = {
    "advantages": lambda: actor_critic(detached=True),
    "advantages of a ratio": lambda: actor_critic(detached=True, ratio=True),
    "targets of a Q-function": lambda: td(detached=True),
    "one branch": lambda: two_branches(detached=True),
    "a cross entropy by hand": margin,
    "an equation that the model has to solve": equation,
    "a term that keeps outputs apart": spread_out,
    "soft actor-critic over all actions": lambda: (
        (layer(4, 3)(X).softmax(1) * (0.2 * layer(4, 3)(X).log_softmax(1) - 1)).sum(1).mean()
    ),
    "an autoencoder": lambda: F.mse_loss(layer(4, 4)(X), X),
    "quantised codes": lambda: (
        F.mse_loss(pairs()[0].detach(), pairs()[1]) + F.mse_loss(pairs()[0], pairs()[1].detach())
    ),
}


@pytest.mark.parametrize("case", UNDETACHED)
def test_a_missing_detach_is_named(case: str) -> None:
    assert len(list(gradient_mistakes(UNDETACHED[case]().grad_fn))) == 1


@pytest.mark.parametrize("case", DETACHED)
def test_gradients_that_are_meant_are_silent(case: str) -> None:
    assert list(gradient_mistakes(DETACHED[case]().grad_fn)) == []


def outside(loss: torch.Tensor) -> list[float]:
    return [float(part) for part, _ in _outside(loss.grad_fn)]


def test_targets_that_an_activation_cannot_put_out_are_counted() -> None:
    targets = torch.linspace(-1, 1, N)
    assert outside(F.mse_loss(layer(4, 1)(X).relu()[:, 0], targets)) == [pytest.approx(0.5, abs=0.07)]
    assert outside((layer(4, 1)(X).relu() - targets[:, None]).abs().mean()) == [pytest.approx(0.5, abs=0.07)]
    assert outside(F.l1_loss(layer(4, 1)(X).sigmoid()[:, 0], 10 + targets)) == [1.0]
    assert outside(F.binary_cross_entropy_with_logits(layer(4, 1)(X)[:, 0], 255 * (targets > 0).float())) == [0.5]


def test_targets_within_its_range_are_not() -> None:
    inside = torch.linspace(0, 1, N)
    assert outside(F.mse_loss(layer(4, 1)(X).sigmoid()[:, 0], inside)) == [0.0]
    assert outside(F.mse_loss(layer(4, 1)(X)[:, 0], inside - 5)) == []
    assert outside(F.binary_cross_entropy_with_logits(layer(4, 1)(X)[:, 0], inside)) == [0.0]
    assert outside(F.mse_loss(3 * layer(4, 1)(X).tanh()[:, 0], 3 * inside)) == []


def test_leaves_between_the_model_and_its_loss_are_found_and_others_are_not() -> None:
    net, head, table = layer(4, 6), layer(6, 3), nn.Parameter(torch.randn(3, 6))
    held = {id(p) for p in net.parameters()}
    cosine = F.normalize(net(X)) @ F.normalize(table).T
    assert [leaf is table for leaf in _behind_trained(F.cross_entropy(cosine, A[:, 0]).grad_fn, held)] == [True]
    below = F.cross_entropy(head(net(X)), A[:, 0])
    assert _behind_trained(below.grad_fn, {id(p) for p in head.parameters()}) == []  # a backbone that is not trained
