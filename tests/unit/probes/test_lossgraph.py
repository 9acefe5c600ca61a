"""Losses that are put together wrongly, read from torch's own graph of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.graph import why_not_finite
from healthcheck.probes.loss_construction import LossGraphProbe

N = 16
Build = Callable[[torch.Tensor], torch.Tensor]
CLASSES = torch.arange(N) % 8
SOFT = torch.linspace(-1, 1, N * 8).view(N, 8).sin().softmax(1)


def found(build: Build, losses: int = 2) -> list[tuple[float, str]]:
    watched = Watched([LossGraphProbe()])
    layer = nn.Linear(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the shapes itself
        for step in range(1, losses + 1):
            loss = build(layer(torch.randn(N, 4)))
            watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
    return [(s.value, s.detail()["which"]) for s in watched.samples]


WRONG: dict[str, tuple[Build, str]] = {
    "softmax, then cross entropy": (lambda z: F.cross_entropy(z.softmax(1), CLASSES), "softmax"),
    "among other terms": (lambda z: 0.5 * F.cross_entropy(z.softmax(1), CLASSES) + z.square().mean(), "softmax"),
    "with label smoothing": (lambda z: F.cross_entropy(z.softmax(1), CLASSES, label_smoothing=0.1), "softmax"),
    "per token": (lambda z: F.cross_entropy(z.softmax(-1).view(4, 4, 8).flatten(0, 1), CLASSES), "softmax"),
    "sigmoid twice": (lambda z: F.binary_cross_entropy_with_logits(z.sigmoid(), torch.zeros(N, 8)), "sigmoid"),
    "a ReLU behind the last layer": (lambda z: F.cross_entropy(z.relu(), CLASSES), "relu"),
    "a tanh behind the last layer": (lambda z: F.cross_entropy(z.tanh(), CLASSES), "tanh"),
    "a sigmoid under cross entropy": (lambda z: F.cross_entropy(z.sigmoid(), CLASSES), "sigmoid"),
    "a ReLU under binary cross entropy": (lambda z: F.binary_cross_entropy_with_logits(z.relu(), z.detach()), "relu"),
    "no logarithm": (lambda z: F.nll_loss(z.softmax(1), CLASSES), "log probabilities"),
    "logits": (lambda z: F.nll_loss(z, CLASSES), "log probabilities"),
    "over the batch": (lambda z: F.nll_loss(z.log_softmax(0), CLASSES), "dimension 0"),
    "a divergence of a softmax": (lambda z: F.kl_div(z.softmax(1), SOFT, reduction="batchmean"), "log_softmax"),
    "a divergence of logits": (lambda z: F.kl_div(z, SOFT, reduction="sum") / N, "linear layer"),
    "mse of (N, 1) and (N)": (lambda z: F.mse_loss(z[:, :1], torch.zeros(N)), "each with each"),
    "squares written out": (lambda z: (torch.zeros(N) - z[:, :1]).pow(2).mean(), "each with each"),
    "l1": (lambda z: F.l1_loss(z[:, :1], torch.zeros(N)), "each with each"),
}

RIGHT: dict[str, Build] = {
    "cross entropy": lambda z: F.cross_entropy(z, CLASSES),
    "log softmax and nll": lambda z: F.nll_loss(z.log_softmax(1), CLASSES),
    "a divergence": lambda z: F.kl_div(z.log_softmax(1), SOFT, reduction="batchmean"),
    "an expected cost of choices": lambda z: (SOFT.sum() - z.softmax(1) * SOFT.log()).mean(),
    "chosen classes, less their probabilities": lambda z: (
        F.one_hot(CLASSES, 8) - F.one_hot(CLASSES, 8) * z.softmax(1)
    ).sum(),
    "logarithm of a softmax": lambda z: F.nll_loss(z.softmax(1).log(), CLASSES),
    "log softmax twice, which changes nothing": lambda z: F.cross_entropy(z.log_softmax(1), CLASSES),
    "attention before the logits": lambda z: F.cross_entropy(z.softmax(1) @ torch.randn(8, 8), CLASSES),
    "a ReLU before a pool": lambda z: F.cross_entropy(z.view(4, 4, 8).relu().mean(1), CLASSES[:4]),
    "logits capped softly": lambda z: F.cross_entropy(30 * (z / 30).tanh(), CLASSES),
    "a temperature on similarities": lambda z: F.cross_entropy(z.softmax(1) / 0.1, CLASSES),
    "binary": lambda z: F.binary_cross_entropy(z.sigmoid(), torch.zeros(N, 8)),
    "equal shapes": lambda z: F.mse_loss(z[:, 0], torch.zeros(N)),
    "all pairs, on purpose": lambda z: (z[:, :1] - z[:, 0]).pow(2).mean(),
    "a square matrix": lambda z: F.mse_loss(z @ z.T, torch.zeros(N, N)),
    "classes in the middle": lambda z: F.cross_entropy(z.view(2, 8, 8).transpose(1, 2), torch.zeros(2, 8).long()),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(case: str) -> None:
    build, word = WRONG[case]
    ((count, which),) = found(build)
    assert count == 1
    assert word in which


@pytest.mark.parametrize("case", RIGHT)
def test_what_only_looks_like_one_is_silent(case: str) -> None:
    assert found(RIGHT[case]) == [(0.0, "")]


def test_it_looks_twice_in_a_run_and_keeps_no_graph() -> None:
    assert len(found(RIGHT["cross entropy"], losses=120)) == 2


def test_a_loss_that_is_not_finite_says_what_made_it_so() -> None:
    logits = torch.randn(N, 8, requires_grad=True)
    nothing = F.cross_entropy(logits, torch.full((N,), -100))
    assert why_not_finite(nothing.grad_fn) == "cross entropy over no targets: every one is ignore_index (-100)"
    of_zero = (logits.relu() * 0).log().mean()
    assert why_not_finite(of_zero.grad_fn) == f"log of {N * 8} of {N * 8} values that are zero or below"
    by_zero = logits.sum() / torch.zeros(())
    assert why_not_finite(by_zero.grad_fn) == "a division by 1 of 1 values that are zero"
    assert why_not_finite((logits * math.inf).sum().grad_fn) == ""
