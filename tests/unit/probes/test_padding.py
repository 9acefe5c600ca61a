"""Padding among the targets, and ends of texts that are none: where the model says what they are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.probes.language import PaddingProbe

WORDS, PAD, END = 12, 0, 1
TEXTS = torch.tensor([[5, 6, 7, END] + [PAD] * 16, [8, 9, END] + [PAD] * 17] * 3)
"""Six texts of twenty tokens: 6 x 16.5 pads less the first of each, of 120."""
Loss = Callable[[torch.Tensor], torch.Tensor]


class Speaker(nn.Module):
    def __init__(self, padding_idx: int | None = PAD, config: dict[str, int] | None = None, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 4, padding_idx=padding_idx)
        self.out = nn.Linear(4, WORDS)
        if config is not None:
            self.config = SimpleNamespace(**config)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(texts)).flatten(0, 1)


def plain(z: torch.Tensor, **options) -> torch.Tensor:
    return F.cross_entropy(z, TEXTS.flatten(), **options)


def shares(model: nn.Module, loss: Loss = plain, batch: object = None, metric: str = "targets.padding") -> list[float]:
    watched = Watched([PaddingProbe()])
    value = loss(model(TEXTS))
    watched.emit(EventKind.LOSS, 1, model=View(model), loss=value.detach(), loss_graph=value.grad_fn, batch=batch)
    return watched.values(metric)


COUNTS: dict[str, tuple[nn.Module, Loss]] = {
    "of an embedding": (Speaker(), plain),
    "of a config": (Speaker(None, {"pad_token_id": PAD, "vocab_size": WORDS, "eos_token_id": END}), plain),
    "summed and divided": (Speaker(), lambda z: plain(z, reduction="sum") / 60),
    "with weights of its own": (Speaker(), lambda z: plain(z, weight=torch.ones(WORDS))),
}

SILENT: dict[str, tuple[nn.Module, Loss, list[float]]] = {
    "ignored": (Speaker(), lambda z: plain(z, ignore_index=PAD), []),
    "masked by the script": (Speaker(), lambda z: (plain(z, reduction="none") * (TEXTS.flatten() != PAD)).mean(), []),
    "of no weight": (
        Speaker(),
        lambda z: plain(z, weight=torch.ones(WORDS).index_fill(0, torch.tensor(PAD), 0.0)),
        [0.0],
    ),
    "classes that are no tokens": (Speaker(words=30), plain, []),
    "no padding known": (Speaker(None), plain, []),
    "padding that ends texts": (
        Speaker(None, {"pad_token_id": PAD, "vocab_size": WORDS, "eos_token_id": PAD}),
        plain,
        [],
    ),
}


@pytest.mark.parametrize("case", COUNTS)
def test_padding_that_counts_is_measured(case: str) -> None:
    model, loss = COUNTS[case]
    assert shares(model, loss) == [pytest.approx((99 - 6) / 120)]


@pytest.mark.parametrize("case", SILENT)
def test_padding_that_does_not_count_is_none(case: str) -> None:
    model, loss, wanted = SILENT[case]
    assert shares(model, loss) == wanted


def ends(labels: torch.Tensor, mask: torch.Tensor | None = None) -> list[float]:
    model = Speaker(None, {"pad_token_id": END, "vocab_size": WORDS, "eos_token_id": END})
    texts = TEXTS.masked_fill(TEXTS == PAD, END)
    mask = (TEXTS != PAD).long() if mask is None else mask
    return shares(
        model, batch={"input_ids": texts, "labels": labels, "attention_mask": mask}, metric="targets.ends_masked"
    )


def test_ends_of_texts_that_are_masked_with_the_padding_are_counted() -> None:
    texts = TEXTS.masked_fill(TEXTS == PAD, END)
    assert ends(texts.masked_fill(texts == END, -100)) == [1.0]
    assert ends(texts.masked_fill(TEXTS == PAD, -100)) == [0.0]


def test_a_batch_whose_mask_shows_no_end_says_nothing() -> None:
    assert ends(TEXTS, torch.zeros_like(TEXTS)) == []
