"""Attention over rows that are filled up, with and without a mask."""

from __future__ import annotations

import pytest
import torch
from driver import Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.attended_padding import AttendedPaddingProbe
from healthcheck.probes.language import LOOKS

ROWS, LENGTH, WORDS = 8, 12, 30
LENGTHS = torch.tensor([12, 5, 9, 7, 4, 11, 8, 6])
MASK = torch.arange(LENGTH)[None] < LENGTHS[:, None]
FULL = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
READ = FULL.masked_fill(~MASK, 0)
SEGMENTS = (torch.arange(LENGTH)[None] >= LENGTHS[:, None]).long()
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Classifier(nn.Module):
    def __init__(
        self, *, masked: bool = False, causal: bool = False, front: int = 0, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(WORDS, 8, padding_idx=padding_idx), nn.Embedding(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head, self.token = nn.Linear(8, 2), nn.Parameter(torch.zeros(1, front, 8))
        self.masked, self.causal, self.front = masked, causal, front

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(ROWS, -1, -1), self.words(read) + self.segments(SEGMENTS)], 1)
        seen = torch.cat([torch.ones(ROWS, self.front, dtype=torch.bool), MASK], 1)
        hide = ~seen if self.masked else None
        out = self.layer(x, src_mask=CAUSAL if self.causal else None, src_key_padding_mask=hide, is_causal=self.causal)
        return self.head(out[:, 0])


def layers(model: nn.Module, read: torch.Tensor = READ) -> float:
    target = torch.arange(ROWS) % 2
    watched = Watched([AttendedPaddingProbe()])
    for step in range(1, LOOKS[0] + 1):
        loss = nn.functional.cross_entropy(model(read), target)
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn, phase="train")
    return sum(watched.values("attention.to_padding"))


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("front", [0, 1])
def test_padding_without_a_mask_is_seen_whether_the_embedding_knows_of_it_or_not(
    padding_idx: int | None, front: int
) -> None:
    assert layers(Classifier(padding_idx=padding_idx, front=front)) == 1


@pytest.mark.parametrize("front", [0, 1])
def test_a_mask_hides_it(front: int) -> None:
    assert layers(Classifier(masked=True, front=front)) == 0


def test_causal_layers_and_rows_that_are_full_have_none() -> None:
    assert layers(Classifier(causal=True)) == 0
    assert layers(Classifier(), FULL) == 0
