"""What is left of a loss without its terms: constants, and numbers that come of the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.constant_terms import LOOKS, ConstantTermProbe
from healthcheck.probes.loss_mistakes import products_of_each_with_each

N = 16
Terms = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def dice(out: torch.Tensor, y: torch.Tensor, *, cut: bool) -> torch.Tensor:
    p = out.softmax(1)[:, 0]
    p = (p > 0.34).float() if cut else p
    wanted = (y == 0).float()
    return 1 - (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)


def judged(terms: Terms, *, dtype: torch.dtype = torch.float32) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3).to(dtype)
    given = torch.Generator().manual_seed(1)

    def loss() -> torch.Tensor:
        x = torch.randn(N, 6, generator=given).to(dtype)
        y = torch.randint(0, 3, (N,), generator=given)
        return terms(net(x), y)

    watched = Watched([ConstantTermProbe()])
    for step in range(1, 7):
        value = loss()
        watched.emit(EventKind.LOSS, step, loss=value.detach(), loss_graph=value.grad_fn, phase="train")
    return watched.values("loss.gradientless")


@pytest.mark.parametrize(
    "terms",
    [
        lambda out, y: cross(out, y) + 0.5 * out.pow(2).mean().item(),
        lambda out, y: cross(out, y) + out.pow(2).mean().detach(),
        lambda out, y: 0.5 * (cross(out, y) + dice(out, y, cut=True)),
        lambda out, y: out.pow(2).mean() - F.mse_loss(out.detach(), F.one_hot(y, 3).float()),
    ],
)
def test_a_term_that_differs_from_batch_to_batch_without_a_gradient_is_told(terms: Terms) -> None:
    assert judged(terms)[-1] == 1.0


@pytest.mark.parametrize(
    "terms",
    [
        lambda out, y: cross(out, y) + 0.1 * out.pow(2).mean() + 1e-8,
        lambda out, y: 1 - cross(out, y) * -1.0,
        lambda out, y: cross(out, y) / 4 + 0.5,
    ],
)
def test_constants_are_not(terms: Terms) -> None:
    assert set(judged(terms)) == {0.0}


def test_a_term_that_torch_does_not_keep_is_not_judged() -> None:
    assert judged(lambda out, y: cross(out, y) + dice(out, y, cut=False)) == []


def test_neither_are_losses_without_numbers_nor_those_in_half_precision() -> None:
    assert judged(cross) == []
    assert judged(lambda out, y: cross(out, y) + out.mean().item(), dtype=torch.bfloat16) == []


@pytest.mark.parametrize(("both", "said"), [(True, []), (False, 1.0)])
def test_the_losses_of_optimizers_that_take_turns_are_not_judged(both: bool, said: object) -> None:
    net, other, x = nn.Linear(6, 3), nn.Linear(6, 3), torch.randn(N, 6)
    sides = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net, other)]
    watched, y = Watched([ConstantTermProbe()]), torch.arange(N) % 3
    for step in range(1, LOOKS[4] + 1):
        loss = cross(net(x + step), y) + other(x + step).mean().detach()
        watched.emit(
            EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train", model=View(net, sides)
        )
        for side, part in zip(sides[: 1 + both], (net, other), strict=False):
            part(x).sum().backward()
            side.step()
    values = watched.values("loss.gradientless")
    assert values[1:] == said if both else values[-1] == said


def test_the_scale_of_mixed_precision_is_no_factor_of_the_loss() -> None:
    net, x, y = nn.Linear(6, 3), torch.randn(N, 6), torch.arange(N) % 3
    watched = Watched([ConstantTermProbe()])
    for step in range(1, LOOKS[4] + 1):
        loss = F.cross_entropy(net(x + step), y) + 1e-6
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=(loss * 65536.0).grad_fn, phase="train")
    assert watched.values("loss.gradientless") == [0.0] * 5


def weighed(losses: torch.Tensor, weights: torch.Tensor) -> list[str]:
    return list(products_of_each_with_each((losses * weights).mean().grad_fn))


def test_weights_in_a_column_times_losses_in_a_row_are_a_matrix() -> None:
    losses = F.cross_entropy(nn.Linear(6, 3)(torch.randn(N, 6)), torch.arange(N) % 3, reduction="none")
    weights = torch.rand(N, 1)
    (said,) = weighed(losses, weights)
    assert "(16,) times (16, 1)" in said
    assert weighed(losses, weights[:, 0]) == []
    assert weighed(losses[:, None], weights) == []
    assert weighed(losses[:, None], weights[:, 0]) == []  # made a column on purpose: each with each
