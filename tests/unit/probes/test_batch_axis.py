"""The batch, followed through models: where its rows meet, beside models that only look like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from healthcheck.probes.batch_axis import rows_that_meet

B, T = 12, 5
Make = Callable[[], torch.Tensor]
X = torch.randn(B, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(B) % 3
WINDOWS = torch.randn(B, B, 6, generator=torch.Generator().manual_seed(2))
TEXTS = torch.randn(B, T, 6, generator=torch.Generator().manual_seed(3))
TAGS = (torch.arange(B * T) % 3).view(B, T)
NET, OTHER, HEAD, WIDE = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(16, 3)
FIRST, SECOND = nn.LSTM(6, 8, batch_first=True), nn.GRU(6, 8)
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
PICTURES = torch.randn(B, 3, 9, 9, generator=torch.Generator().manual_seed(4))
CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
)


def meets(loss: torch.Tensor, *batch: torch.Tensor) -> list[str]:
    return list(rows_that_meet(loss.grad_fn, B, batch or (X, Y)))


def classify(features: torch.Tensor, head: nn.Module = HEAD) -> torch.Tensor:
    return F.cross_entropy(head(features), Y)


def standardised(h: torch.Tensor) -> torch.Tensor:
    return (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()


def pairs(many: torch.Tensor) -> torch.Tensor:
    items = OTHER(TEXTS[:, :4]).reshape(B * 4, 8)
    return F.cross_entropy(WIDE(torch.cat([many, items], 1)), Y.repeat_interleave(4))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda: classify(FIRST(WINDOWS)[0][-1]), "made of a single row"),
        (lambda: F.mse_loss(HEAD(FIRST(WINDOWS)[0][-1]), torch.zeros(B, 3)), "made of a single row"),
        (lambda: classify(torch.cat([NET(X), OTHER(X)], 0).view(B, -1), WIDE), "dim=1"),
        (lambda: classify((h := NET(X).relu()) / h.max()), "the maximum of all values of the batch"),
        (lambda: classify((h := NET(X)) / h.abs().amax(0)), "maximum of each feature over the rows"),
        (lambda: classify(F.normalize(NET(X), dim=0)), "norm of each feature over the rows"),
        (lambda: classify(NET(X).softmax(0)), "softmax along dimension 0"),
        (lambda: pairs(NET(X).repeat(4, 1)), "repeat against repeat_interleave"),
    ],
)
def test_rows_that_get_into_the_answers_of_others_are_told(loss: Make, words: str) -> None:
    (said,) = meets(loss())
    assert words in said


@pytest.mark.parametrize(
    "loss",
    [
        lambda: classify(NET(X)),
        lambda: classify(FIRST(WINDOWS)[0][:, -1]),
        lambda: classify(FIRST(WINDOWS)[1][0][-1]),
        lambda: classify(SECOND(WINDOWS.transpose(0, 1))[0][-1]),
        lambda: classify(torch.cat([NET(X), OTHER(X)], 1), WIDE),
        lambda: classify(torch.stack([NET(X), OTHER(X)], 1).flatten(1), WIDE),
        lambda: classify((h := NET(X).relu()) / h.amax(1, keepdim=True)),
        lambda: classify(F.normalize(NET(X), dim=1)),
        lambda: classify(standardised(NET(X))),
        lambda: classify(ENCODER(NET(TEXTS)).mean(1)),
        lambda: F.cross_entropy(CONVOLUTIONS(PICTURES), Y),
        lambda: classify(0.7 * (h := NET(X)) + 0.3 * h.flip(0)),
        lambda: F.cross_entropy((o := HEAD(NET(X))) - o.max(), Y),
        lambda: pairs(NET(X).repeat_interleave(4, 0)),
        lambda: pairs(NET(X)[:, None].expand(B, 4, 8).reshape(-1, 8)),
        lambda: F.cross_entropy(F.normalize(NET(X), dim=1) @ F.normalize(OTHER(X), dim=1).T, torch.arange(B)),
        lambda: F.mse_loss(F.normalize(NET(X), dim=0), F.normalize(OTHER(X), dim=0)),
    ],
)
def test_rows_that_are_kept_apart_or_meet_on_purpose_are_not(loss: Make) -> None:
    assert meets(loss()) == []


def test_each_row_with_each_is_meant() -> None:
    h = NET(X)
    both = WIDE(torch.cat([h.repeat(B, 1), h.repeat_interleave(B, 0)], 1))
    assert meets(F.cross_entropy(both, Y.repeat(B))) == []


@pytest.mark.parametrize("turned", [True, False])
def test_answers_in_the_order_of_time_against_targets_in_that_of_rows_are_told(turned: bool) -> None:
    out = HEAD(SECOND(TEXTS.transpose(0, 1))[0])
    answers = out.transpose(0, 1).reshape(-1, 3) if turned else out.view(-1, 3)
    said = meets(F.cross_entropy(answers, TAGS.view(-1)), TEXTS, TAGS)
    assert [("positions first" in words) for words in said] == ([] if turned else [True])


def test_a_loss_by_hand_says_nothing() -> None:
    h = NET(X)
    assert meets((h / h.max()).pow(2).mean()) == []
