"""Targets of language models against the tokens that were read, and attention that looks ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Watched
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from healthcheck.core.events import EventKind
from healthcheck.probes.language import LOOKS, TokenProbe

WORDS, LENGTH, ROWS = 50, 12, 8
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def seeing_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked(mask: torch.Tensor) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_hand(mask: torch.Tensor | None) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v

    return attend


BELOW = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ADDED = torch.zeros(LENGTH, LENGTH).masked_fill(~BELOW, torch.finfo(torch.float32).min)
PREFIX = BELOW.clone()
PREFIX[:4, :4] = True


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.attend = attend

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        if memory is not None:
            k = v = memory.unflatten(2, (2, 8)).transpose(1, 2)
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, *layers: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Layer(attend) for attend in layers)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def seen(*losses: torch.Tensor) -> dict[str, float]:
    """What the probe says of the last of these losses, each shown often enough to be looked at."""
    watched = Watched([TokenProbe()])
    for step in range(1, LOOKS[0] + 1):
        watched.emit(EventKind.LOSS, step, loss_graph=torch.stack(losses).sum().grad_fn)
    return {name: watched.last(name) for name in watched.names()}


def text() -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH + 3), generator=torch.Generator().manual_seed(0))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ahead: int) -> torch.Tensor:
    tokens = text()
    logits = model(tokens[:, :LENGTH])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, ahead : ahead + LENGTH].flatten())


@pytest.mark.parametrize("attend", [causal, masked(BELOW), masked(ADDED), by_hand(BELOW)])
def test_causal_attention_is_causal_however_it_is_said(attend: Attend) -> None:
    assert seen(loss_of(Model(attend, causal), 1)) == {"targets.ahead": 1, "attention.ahead": 0}


@pytest.mark.parametrize("attend", [seeing_all, masked(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), by_hand(None)])
def test_layers_that_see_the_next_token_are_counted(attend: Attend) -> None:
    assert seen(loss_of(Model(attend, causal, attend), 1)) == {"targets.ahead": 1, "attention.ahead": 2}


def test_layers_of_torch_with_and_without_a_mask() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model, mask = Model(), nn.Transformer.generate_square_subsequent_mask(LENGTH)
    with_mask = lambda t: model.head(layer(model.embed(t), src_mask=mask, is_causal=True))  # noqa: E731
    assert seen(loss_of(with_mask, 1))["attention.ahead"] == 0
    assert seen(loss_of(lambda t: model.head(layer(model.embed(t))), 1))["attention.ahead"] == 1


def test_sequences_in_columns_are_read_as_well() -> None:
    tokens = text().t()
    layer, model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), Model()
    logits = model.head(layer(model.embed(tokens[:LENGTH])))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1 : LENGTH + 1].flatten())
    assert seen(loss) == {"targets.ahead": 1, "attention.ahead": 1}


@pytest.mark.parametrize("ahead", [0, 2, 3])
def test_targets_out_of_place_are_told_with_their_distance(ahead: int) -> None:
    assert seen(loss_of(Model(causal), ahead))["targets.ahead"] == ahead


def test_labels_that_model_and_data_shift_are_two_ahead() -> None:
    tokens = text()
    logits = Model(causal)(tokens[:, :LENGTH])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 2 : LENGTH + 1].flatten())
    assert seen(loss)["targets.ahead"] == 2


def test_several_heads_that_look_further_and_further_ahead_are_judged_by_the_nearest() -> None:
    model = Model(causal)
    assert seen(loss_of(model, 1), loss_of(model, 2), loss_of(model, 3))["targets.ahead"] == 1


def test_models_that_see_all_may_be_asked_for_what_they_see() -> None:
    assert seen(loss_of(Model(seeing_all), 0)) == {}


def test_masked_language_models_and_taggers_have_other_targets() -> None:
    tokens = text()[:, :LENGTH]
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    logits = Model(seeing_all)(tokens.masked_fill(hidden, 0))
    assert seen(F.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(~hidden, -100).flatten())) == {}
    tags = torch.randint(0, WORDS, tokens.shape)
    assert seen(F.cross_entropy(Model(seeing_all)(tokens).flatten(0, 1), tags.flatten())) == {}


def test_a_prefix_whose_targets_do_not_count_may_be_seen_whole() -> None:
    tokens = text()
    logits, targets = Model(masked(PREFIX))(tokens[:, :LENGTH]), tokens[:, 1 : LENGTH + 1].clone()
    targets[:, :4] = -100
    assert seen(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))["attention.ahead"] == 0


def test_encoders_and_cross_attention_of_equal_length_may_see_all() -> None:
    source, target = text()[:, :LENGTH].flip(1), text()
    encoder, decoder = Model(seeing_all), Model(causal)
    cross = Layer(by_hand(None))
    memory = encoder.layers[0](encoder.embed(source))
    x = cross(decoder.layers[0](decoder.embed(target[:, :LENGTH])), memory)
    loss = F.cross_entropy(decoder.head(x).flatten(0, 1), target[:, 1 : LENGTH + 1].flatten())
    assert seen(loss) == {"targets.ahead": 1, "attention.ahead": 0}


def test_nothing_is_computed_anew_under_activation_checkpointing() -> None:
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return by_hand(None)(q, k, v)

    model = Model(attend)
    layer = model.layers[0]
    found = seen(loss_of(lambda t: model.head(checkpoint(layer, model.embed(t), use_reentrant=False)), 1))
    assert found == {"targets.ahead": 1}
    assert len(calls) == 1
