"""What a loss compares and which way, each mistake beside what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.loss_comparisons import (
    LossComparisonProbe,
    arguments_swapped,
    normalised_over_batch,
    without_derivative,
)
from healthcheck.probes.loss_mistakes import shape_mistakes
from healthcheck.probes.loss_values import unfit

Make = Callable[[], torch.Tensor]
N = 12
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
NET = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
ONE = nn.Linear(6, 1)
MASK = (torch.arange(N * 4).view(N, 4) % 3 == 0).float()
HALVES = torch.cat([torch.arange(N // 2, N), torch.arange(N // 2)])


def unit(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return F.normalize(NET(x), dim=dim)


def own(*, masked: bool) -> torch.Tensor:
    z = unit(X)
    similarities = z @ z.T / 0.2
    if masked:
        similarities = similarities.masked_fill(torch.eye(N, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarities, HALVES)


def overlap(p: torch.Tensor) -> torch.Tensor:
    return ((2 * (p * MASK).sum(1) + 1) / (p.sum(1) + MASK.sum(1) + 1)).mean()


def union(p: torch.Tensor) -> torch.Tensor:
    both = (p * MASK).sum(1)
    return (both / (p.sum(1) + MASK.sum(1) - both + 1)).mean()


def false_alarms(p: torch.Tensor) -> torch.Tensor:
    return ((p * (1 - MASK)).sum(1) / (p.sum(1) + 1)).mean()


def probabilities() -> torch.Tensor:
    return torch.sigmoid(NET(X))


WRONG: dict[str, tuple[Make, str]] = {
    "each row is its own candidate": (lambda: own(masked=False), "mask the diagonal"),
    "two views that are one": (lambda: F.cross_entropy(unit(X) @ unit(X).T / 0.2, torch.arange(N)), "one and the same"),
    "two halves that are one": (
        lambda: F.cross_entropy(
            (z := F.normalize(torch.cat([NET(X), NET(X)]), dim=1)) @ z.T - 1e9 * torch.eye(2 * N),
            torch.cat([torch.arange(N, 2 * N), torch.arange(N)]),
        ),
        "one and the same",
    ),
    "a cosine of two views that are one": (lambda: -F.cosine_similarity(NET(X), NET(X)).mean(), "one and the same"),
    "Dice": (lambda: overlap(probabilities()), "Dice"),
    "a logarithm of Dice": (lambda: 1 + overlap(probabilities()).log(), "Dice"),
    "a union": (lambda: union(probabilities()), "Dice"),
    "rounded": (lambda: F.mse_loss(probabilities().round(), MASK), "round()"),
    "its sign": (lambda: F.l1_loss(NET(X).sign(), MASK), "sign()"),
}
RIGHT: dict[str, Make] = {
    "the diagonal is masked": lambda: own(masked=True),
    "two views": lambda: F.cross_entropy(unit(X) @ unit(X + 0.1).T / 0.2, torch.arange(N)),
    "a cosine of two views": lambda: -F.cosine_similarity(NET(X), NET(X + 0.1)).mean(),
    "a square": lambda: (NET(X) * NET(X).detach()).mean() + NET(X).square().mean(),
    "one less Dice": lambda: 1 - overlap(probabilities()),
    "Dice below zero": lambda: -overlap(probabilities()),
    "Dice beside a cross entropy": lambda: F.binary_cross_entropy(probabilities(), MASK) - overlap(probabilities()),
    "a rate of false alarms": lambda: false_alarms(probabilities()),
    "straight through": lambda: F.mse_loss((p := probabilities()) + (p.round() - p).detach(), MASK),
    "a fraction of what is rounded": lambda: F.mse_loss((x := NET(X)) - x.floor(), MASK),
}


def auto_encoder(
    spread: Callable[[torch.Tensor], torch.Tensor], variance: Callable[[torch.Tensor], torch.Tensor]
) -> Make:
    def make() -> torch.Tensor:
        mean, log = NET(X).chunk(2, 1)
        z = mean + spread(log) * torch.randn_like(mean)
        divergence = -0.5 * (1 + variance(log).log() - mean**2 - variance(log)).sum(1).mean()
        return F.mse_loss(nn.Linear(2, 6)(z), X) + divergence

    return make


WRONG["a variance for a spread"] = auto_encoder(torch.exp, torch.exp), "0.5 * logvar"
RIGHT["half of the logarithm"] = auto_encoder(lambda log: (0.5 * log).exp(), torch.exp)
RIGHT["a logarithm of the spread"] = auto_encoder(torch.exp, lambda log: (2 * log).exp())


def ratio_of_policies() -> torch.Tensor:
    log = NET(X).log_softmax(1).gather(1, torch.arange(N).unsqueeze(1) % 4)
    ratio = (log - log.detach()).exp()
    return -(ratio * torch.randn(N, 1)).mean() + (ratio - 1 - (log - log.detach())).mean()


RIGHT["a ratio of policies and their divergence"] = ratio_of_policies


def penalty(norm: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    def make() -> torch.Tensor:
        critic = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.LeakyReLU(), nn.Flatten(), nn.Linear(48, 1))
        x = torch.randn(5, 1, 4, 4, requires_grad=True)
        [slope] = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return critic(x.detach()).mean() + 10 * ((norm(slope) - 1) ** 2).mean()

    return make


WRONG["a penalty for each pixel"] = penalty(lambda slope: slope.norm(2, dim=1)), "flatten(1)"
RIGHT["a penalty for each picture"] = penalty(lambda slope: slope.flatten(1).norm(2, dim=1))
RIGHT["a penalty over all dimensions"] = penalty(lambda slope: torch.linalg.vector_norm(slope, dim=(1, 2, 3)))


def told(make: Make) -> tuple[float, str]:
    watched = Watched([LossComparisonProbe()])
    for step in (1, 2, 3):
        loss = make()
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
    value = watched.last("loss.miscompared")
    return value, watched.facts("loss.miscompared")["which"] if value else ""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_comparison_is_named(case: str) -> None:
    make, words = WRONG[case]
    value, which = told(make)
    assert value >= 1
    assert words in which


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_one_is_silent(case: str) -> None:
    assert told(RIGHT[case])[0] == 0


def test_an_operation_without_a_derivative_beside_another_way_is_no_mistake() -> None:
    p = probabilities()
    assert list(without_derivative((p.round() * p).mean().grad_fn)) == []


TARGETS = (torch.arange(N) % 2).float().unsqueeze(1)
SWAPPED: dict[str, Make] = {
    "probabilities": lambda: F.binary_cross_entropy(TARGETS, torch.sigmoid(ONE(X))),
    "logits": lambda: F.binary_cross_entropy_with_logits(TARGETS, ONE(X)),
}
IN_ORDER: dict[str, Make] = {
    "probabilities": lambda: F.binary_cross_entropy(torch.sigmoid(ONE(X)), TARGETS),
    "logits": lambda: F.binary_cross_entropy_with_logits(ONE(X), TARGETS),
    "both are trained": lambda: F.binary_cross_entropy(torch.sigmoid(ONE(X)), torch.sigmoid(ONE(X + 1))),
    "squared errors, which have no order": lambda: F.mse_loss(TARGETS, ONE(X)),
}


@pytest.mark.parametrize("case", SWAPPED)
def test_arguments_that_changed_places_are_named(case: str) -> None:
    assert list(arguments_swapped(SWAPPED[case]().grad_fn))


@pytest.mark.parametrize("case", IN_ORDER)
def test_arguments_in_order_are_silent(case: str) -> None:
    assert list(arguments_swapped(IN_ORDER[case]().grad_fn)) == []


def compared(one: torch.Tensor, other: torch.Tensor) -> Iterator[str]:
    return normalised_over_batch(F.cross_entropy(one @ other / 0.2, torch.arange(len(one))).grad_fn)


def test_vectors_that_are_normalised_over_the_batch_are_named_where_rows_are_compared() -> None:
    assert list(compared(unit(X, 0), unit(X + 1, 0).T))
    assert list(compared(unit(X), unit(X + 1).T)) == []
    # Redundancy is reduced over features, whose norms are over the batch.
    assert list(normalised_over_batch((unit(X, 0).T @ unit(X + 1, 0)).square().mean().grad_fn)) == []


def test_a_cross_entropy_of_one_output_is_named_also_with_probabilities_for_targets() -> None:
    assert any("one value" in said for said in shape_mistakes(F.cross_entropy(ONE(X), TARGETS).grad_fn))
    two = F.cross_entropy(nn.Linear(6, 2)(X), torch.cat([TARGETS, 1 - TARGETS], 1))
    assert list(shape_mistakes(two.grad_fn)) == []


def test_a_softmax_for_several_labels_a_row_is_named() -> None:
    def told_unfit(p: torch.Tensor, y: torch.Tensor) -> list[str]:
        return [words for flag, words in unfit(F.binary_cross_entropy(p, y).grad_fn) if bool(flag)]

    several, one = MASK, F.one_hot(torch.arange(N) % 4, 4).float()
    assert any("sigmoid" in said for said in told_unfit(NET(X).softmax(1), several))
    assert told_unfit(NET(X).softmax(1), one) == []
    assert told_unfit(NET(X).sigmoid(), several) == []
