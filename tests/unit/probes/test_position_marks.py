"""Attention over tokens with positions that differ, or that are all one, in the ways in which people write it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from healthcheck.probes.position_marks import positions_alike

ROWS, LENGTH, WIDTH, WORDS = 8, 10, 16, 9
READ = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
ANGLE = torch.arange(64)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
TABLE = torch.stack([ANGLE.sin(), ANGLE.cos()], -1).flatten(1)
MARKS = {
    "steps": TABLE[:LENGTH],
    "rows": TABLE[:ROWS, None],
    "whole-number": torch.zeros(LENGTH, WIDTH).index_fill(1, torch.arange(1, WIDTH, 2), 1.0),
}


class Written(nn.Module):
    """Attention by hand, with ``softmax`` or torch's own function."""

    def __init__(self, *, own: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.own = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH), own

    def forward(self, x: torch.Tensor, turn: bool = False, hide: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.view(ROWS, -1, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if turn:  # rotations that depend on the position
            q, k = (t * ANGLE[:LENGTH].cos() + t.flip(-1) * ANGLE[:LENGTH].sin() for t in (q, k))
        if self.own:
            scores = q @ k.transpose(-2, -1) / math.sqrt(8)
            mixed = (scores if hide is None else scores.masked_fill(hide, -torch.inf)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=None if hide is None else ~hide)
        return x + self.out(mixed.transpose(1, 2).reshape(ROWS, -1, WIDTH))


def said(x: torch.Tensor, layer: nn.Module, **given: object) -> list[float]:
    torch.manual_seed(0)
    return [float(flag) for flag in positions_alike(layer(x, **given).mean(1).square().mean().grad_fn)]


@pytest.fixture
def words() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(WORDS, WIDTH)


@pytest.mark.parametrize(("marks", "alike"), [("steps", 0.0), ("rows", 1.0), ("whole-number", 1.0)])
@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
        nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True),
        nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True),
        Written(),
        Written(bias=False),
        Written(own=False),
    ],
)
def test_marks_that_do_not_differ_along_the_row_are_seen_however_attention_is_written(
    words: nn.Embedding, layer: nn.Module, marks: str, alike: float
) -> None:
    assert said(words(READ) * 4 + MARKS[marks], layer) == [alike]
    assert said(nn.functional.dropout(words(READ) * 4 + MARKS[marks], 0.1), layer) in ([alike], [0.0])


@pytest.mark.parametrize(("marks", "alike"), [("steps", 0.0), ("rows", 1.0)])
def test_so_they_are_where_positions_come_first(words: nn.Embedding, marks: str, alike: float) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
    assert said((words(READ) + MARKS[marks]).transpose(0, 1), layer) == [alike]


def test_sets_learnt_tables_and_other_ways_to_mark_positions_are_not_judged(words: nn.Embedding) -> None:
    x, rows = words(READ), MARKS["rows"]
    table, places = nn.Parameter(torch.zeros(1, LENGTH, WIDTH)), nn.Embedding(LENGTH, WIDTH)
    nn.init.zeros_(places.weight)
    assert said(x, Written()) == []
    assert said(x + table, Written()) == []
    assert said(x + places(torch.arange(LENGTH)), Written()) == []
    assert said(x + torch.tanh(x), Written()) == []
    assert said(x + rows, Written(), turn=True) == []
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    assert said(x + rows, Written(own=False), hide=causal) == []
    assert said(x + rows, Written(), hide=causal) == []


def test_rows_in_which_no_token_comes_twice_show_nothing(words: nn.Embedding) -> None:
    once = torch.stack([torch.randperm(WORDS) for _ in range(ROWS)])
    assert said(words(once) + MARKS["rows"], Written()) == [0.0]
