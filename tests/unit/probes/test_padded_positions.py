"""Labels at padded positions, in each way in which a model says what padding is, and where they do no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from healthcheck.core.events import EventKind
from healthcheck.probes.language import LOOKS
from healthcheck.probes.padded_positions import PaddedPositionsProbe, padding_of

ROWS, LENGTH, WORDS, CLASSES, PAD = 8, 12, 30, 4, 0
LENGTHS = torch.tensor([12, 5, 9, 7, 4, 11, 8, 6])
MASK = torch.arange(LENGTH)[None] < LENGTHS[:, None]
"""Positions that are none of padding."""
READ = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).masked_fill(~MASK, PAD)
TAGS = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
FILLED = TAGS.masked_fill(~MASK, 0)
Loss = Callable[[torch.Tensor], torch.Tensor]


class Attends(nn.Module):
    """A tagger that is told what padding is by its embedding, by the mask of its attention, by both or by neither."""

    def __init__(self, padding_idx: int | None = PAD, masked: bool = False) -> None:
        super().__init__()
        self.words, self.masked = nn.Embedding(WORDS, 8, padding_idx=padding_idx), masked
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(read), src_key_padding_mask=~MASK if self.masked else None))


class FlashAttends(Attends):
    """Attention by torch's fused kernel, with a boolean mask."""

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        x = self.words(read)[:, None]
        return self.head(
            F.scaled_dot_product_attention(x, x, x, attn_mask=MASK[:, None, None].expand(-1, 1, LENGTH, -1))[:, 0]
        )


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.layer = nn.GRU(8, 8, batch_first=True)

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.words(read), LENGTHS, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


def flat(labels: torch.Tensor, **options) -> Loss:
    return lambda z: F.cross_entropy(z.flatten(0, 1), labels.flatten(), **options)


def share(model: nn.Module, loss: Loss) -> list[float]:
    watched = Watched([PaddedPositionsProbe()])
    for step in range(1, LOOKS[0] + 1):
        value = loss(model(READ))
        watched.emit(EventKind.LOSS, step, loss=value.detach(), loss_graph=value.grad_fn)
    return watched.values("targets.at_padding")


ALL = (~MASK).sum().item() / MASK.numel()
BEHIND = ((~MASK).sum().item() - 7) / MASK.numel()
"""Less the first of each run, which may be an end of text."""

FAULTS: dict[str, tuple[nn.Module, Loss, float]] = {
    "padding_idx": (Attends(), flat(FILLED), BEHIND),
    "the ends of rows": (Attends(None), flat(FILLED), BEHIND),
    "mask of a TransformerEncoderLayer": (Attends(None, masked=True), flat(FILLED), ALL),
    "both": (Attends(masked=True), flat(FILLED), ALL),
    "mask of a fused kernel": (FlashAttends(None), flat(FILLED), ALL),
    "packed rows": (Packs(), flat(FILLED), ALL),
    "classes second, labels in rows": (Attends(), lambda z: F.cross_entropy(z.transpose(1, 2), FILLED), BEHIND),
    "nll_loss of log_softmax": (
        Attends(),
        lambda z: F.nll_loss(z.log_softmax(-1).view(-1, CLASSES), FILLED.view(-1)),
        BEHIND,
    ),
    "summed and divided": (Attends(), lambda z: flat(FILLED, reduction="sum")(z) / MASK.sum(), BEHIND),
    "label smoothing": (Attends(), flat(FILLED, label_smoothing=0.1), BEHIND),
    "micro-batch, divided": (Attends(), lambda z: flat(FILLED)(z) / 4, BEHIND),
    "filled with another class": (Attends(), flat(TAGS.masked_fill(~MASK, 3)), BEHIND),
    "yes or no": (
        Attends(),
        lambda z: F.binary_cross_entropy_with_logits(z[..., 0], (TAGS % 2).masked_fill(~MASK, 0).float()),
        BEHIND,
    ),
}

HEALTHY: dict[str, tuple[nn.Module, Loss, list[float]]] = {
    "labels of -100": (Attends(), flat(TAGS.masked_fill(~MASK, -100)), [0.0]),
    "an ignore_index of its own": (Attends(), flat(TAGS.masked_fill(~MASK, 7), ignore_index=7), [0.0]),
    "packed rows, -100": (Packs(), flat(TAGS.masked_fill(~MASK, -100)), [0.0]),
    "masked by the script": (
        Attends(),
        lambda z: (flat(FILLED, reduction="none")(z) * MASK.flatten()).sum() / MASK.sum(),
        [],
    ),
    "rows chosen by the mask": (Attends(), lambda z: F.cross_entropy(z[MASK], TAGS[MASK]), []),
    "a class of no weight": (
        Attends(),
        lambda z: F.cross_entropy(
            z.flatten(0, 1), TAGS.clamp(min=1).masked_fill(~MASK, 0).flatten(), weight=torch.tensor([0.0, 1, 1, 1])
        ),
        [0.0],
    ),
    "asked for what it cannot see": (Attends(None, masked=True), flat(TAGS), [0.0]),
    "one label a row": (Attends(), lambda z: F.cross_entropy(z.mean(1), TAGS[:, 0]), []),
    "a distance": (Attends(), lambda z: F.mse_loss(z[..., 0], FILLED.float()), []),
}


@pytest.mark.parametrize("case", FAULTS)
def test_labels_of_padding_that_count_are_measured(case: str) -> None:
    model, loss, wanted = FAULTS[case]
    assert share(model, loss) == [pytest.approx(wanted)]


@pytest.mark.parametrize("case", HEALTHY)
def test_labels_that_do_not_count_or_differ_are_none(case: str) -> None:
    model, loss, wanted = HEALTHY[case]
    assert share(model, loss) == wanted


def test_rows_that_end_with_tokens_that_stand_elsewhere_too_have_no_padding() -> None:
    words = nn.Embedding(WORDS, 4)
    for read in (READ.masked_fill(READ[0, 0] == READ, 0), READ[:, :1].expand(-1, LENGTH), READ * 0):
        assert not padding_of(words(read).grad_fn, read).any()
    assert padding_of(words(READ).grad_fn, READ).equal(~MASK)
    assert padding_of(nn.Embedding(2, 4)(READ.clamp(max=1)).grad_fn, READ) is None  # flags


def test_padding_on_the_left_counts_but_for_single_tokens() -> None:
    turned = _Turned(Attends())
    assert share(turned, flat(FILLED.flip(1))) == [pytest.approx(((~MASK).sum().item() - 1) / MASK.numel())]


def test_next_tokens_are_those_of_the_position_before() -> None:
    following = FILLED[:, 1:]
    hidden = (~MASK[:, :-1] & ~MASK[:, 1:]).sum().item() - (LENGTHS < LENGTH - 1).sum().item()
    found = share(Attends(), lambda z: F.cross_entropy(z[:, :-1].flatten(0, 1), following.flatten()))
    assert found == [pytest.approx(hidden / following.numel())]


class _Turned(nn.Module):
    """Reads its rows from the end."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, read: torch.Tensor) -> torch.Tensor:
        return self.inner(read.flip(1))
