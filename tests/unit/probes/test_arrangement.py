"""What shapes in the graph of a loss show, each beside the spelling that is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from healthcheck.probes.arrangement import _all_linear, _at_padding, _mixing, _of_one, _padding_inside, _rows
from healthcheck.probes.graph import all_behind
from healthcheck.probes.loss_construction import _sign_of_entropy

N, TIME, WIDTH, HEADS = 6, 5, 8, 2
Make = Callable[[], torch.Tensor]
X = torch.randn(N, TIME, WIDTH)
Y = torch.arange(N) % 3
IDS = torch.tensor([[1, 2, 3, 4, 5]] * 2 + [[1, 2, 0, 0, 0]] * 4)


def answered(features: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(nn.Linear(features.shape[-1], 3)(features), Y)


def hidden(layers: int = 2) -> torch.Tensor:
    return nn.LSTM(WIDTH, 4, layers, batch_first=True)(X)[1][0]


def attended(split: Callable[[torch.Tensor], torch.Tensor], *, kernel: bool = False) -> torch.Tensor:
    q, k, v = (split(nn.Linear(WIDTH, WIDTH)(X)) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v) if kernel else (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
    return answered(out.reshape(N, -1))


MIXED: dict[str, tuple[Make, bool]] = {
    "h_n viewed": (lambda: answered(hidden().view(N, -1)), True),
    "h_n reshaped": (lambda: answered(hidden().reshape(N, -1)), True),
    "h_n transposed": (lambda: answered(hidden().transpose(0, 1).reshape(N, -1)), False),
    "h_n joined": (lambda: answered(torch.cat([*hidden()], 1)), False),
    "one layer": (lambda: answered(hidden(1).view(N, -1)), False),
    "time and features flattened": (lambda: answered(nn.Linear(WIDTH, 4)(X).flatten(1)), False),
    "heads by a view": (lambda: attended(lambda x: x.view(N * HEADS, TIME, -1)), True),
    "heads by a view of four": (lambda: attended(lambda x: x.view(N, HEADS, TIME, -1)), True),
    "heads by a view, in a kernel": (lambda: attended(lambda x: x.view(N, HEADS, TIME, -1), kernel=True), True),
    "heads transposed": (lambda: attended(lambda x: x.view(N, TIME, HEADS, -1).transpose(1, 2)), False),
    "heads transposed, in a kernel": (
        lambda: attended(lambda x: x.view(N, TIME, HEADS, -1).transpose(1, 2), kernel=True),
        False,
    ),
    "heads transposed and joined": (
        lambda: attended(lambda x: x.view(N, TIME, HEADS, -1).transpose(1, 2).reshape(N * HEADS, TIME, -1)),
        False,
    ),
    "torch's own attention": (
        lambda: answered(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)(X, X, X)[0].flatten(1)),
        False,
    ),
    "torch's own attention along the first dimension": (
        lambda: answered(nn.MultiheadAttention(WIDTH, HEADS)(X.transpose(0, 1), *[X.transpose(0, 1)] * 2)[0][0]),
        False,
    ),
}


@pytest.mark.parametrize(("make", "wrong"), MIXED.values(), ids=MIXED)
def test_views_that_mix_rows_or_positions_are_found(make: Make, wrong: bool) -> None:
    loss = make()
    assert bool(list(_mixing(all_behind(loss.grad_fn), _rows(loss.grad_fn)))) is wrong


ALONE: dict[str, tuple[Make, bool]] = {
    "one channel a group, 1 x 1": (lambda: nn.GroupNorm(4, 4)(torch.randn(N, 4, 1, 1, requires_grad=True)), True),
    "one channel a group, no map": (lambda: F.group_norm(torch.randn(N, 4, requires_grad=True), 4), True),
    "one channel a group, 2 x 2": (lambda: nn.GroupNorm(4, 4)(torch.randn(N, 4, 2, 2, requires_grad=True)), False),
    "two channels a group": (lambda: nn.GroupNorm(2, 4)(torch.randn(N, 4, 1, 1, requires_grad=True)), False),
    "a layer norm of one": (lambda: nn.LayerNorm(1)(torch.randn(N, 1, requires_grad=True)), True),
    "a layer norm": (lambda: nn.LayerNorm(4)(torch.randn(N, 4, requires_grad=True)), False),
}


@pytest.mark.parametrize(("make", "wrong"), ALONE.values(), ids=ALONE)
def test_normalisations_of_one_value_are_found(make: Make, wrong: bool) -> None:
    assert bool(list(_of_one(all_behind(make().sum().grad_fn)))) is wrong


def read(pick: Callable[[torch.Tensor], torch.Tensor], *, padding: int | None = 0, first: bool = True) -> torch.Tensor:
    embed = nn.Embedding(9, WIDTH, padding_idx=padding)
    ids = IDS if first else IDS.T
    out, _ = nn.LSTM(WIDTH, 4, batch_first=first)(embed(ids))
    return answered(pick(out))


READ: dict[str, tuple[Make, list[float]]] = {
    "the last position": (lambda: read(lambda out: out[:, -1]), [4 / 6]),
    "the last position, time first": (lambda: read(lambda out: out[-1], first=False), [4 / 6]),
    "the first position": (lambda: read(lambda out: out[:, 0]), [0.0]),
    "the last token": (lambda: read(lambda out: out[torch.arange(N), (IDS > 0).sum(1) - 1]), []),
    "the mean": (lambda: read(lambda out: out.mean(1)), []),
    "no padding_idx": (lambda: read(lambda out: out[:, -1], padding=None), []),
    "each position in turn": (lambda: read(lambda out: sum(out[:, t] for t in range(TIME))), []),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize(("make", "shares"), READ.values(), ids=READ)
def test_answers_read_at_padding_are_found(make: Make, shares: list[float]) -> None:
    assert [float(share) for share in _at_padding(all_behind(make().grad_fn))] == pytest.approx(shares)


LOGITS = nn.Linear(4, 3)
STATES = torch.randn(N, 4)
ADVANTAGE = torch.linspace(-1, 1, N)


def chosen(bonus: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS(STATES)
    d = torch.distributions.Categorical(logits=logits)
    return -(d.log_prob(Y) * ADVANTAGE).mean() + bonus(logits)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits).entropy().mean()


SIGNS: dict[str, tuple[Make, float]] = {
    "added": (lambda: chosen(lambda x: 0.1 * entropy(x)), 1.0),
    "taken away": (lambda: chosen(lambda x: -0.1 * entropy(x)), -1.0),
    "by hand, added": (lambda: chosen(lambda x: -0.1 * (x.softmax(1) * x.log_softmax(1)).sum(1).mean()), 1.0),
    "by hand, taken away": (lambda: chosen(lambda x: 0.1 * (x.softmax(1) * x.log_softmax(1)).sum(1).mean()), -1.0),
    "none": (lambda: chosen(lambda x: 0.1 * x.square().mean()), 0.0),
    "of a classifier": (lambda: F.cross_entropy(LOGITS(STATES), Y) + 0.1 * entropy(LOGITS(STATES)), 0.0),
}


@pytest.mark.parametrize(("make", "sign"), SIGNS.values(), ids=SIGNS)
def test_the_sign_of_a_policys_entropy_is_known(make: Make, sign: float) -> None:
    assert _sign_of_entropy(make().grad_fn) == sign


LINEAR: dict[str, tuple[nn.Module, int]] = {
    "three layers": (nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 3)), 3),
    "a wide one": (nn.Sequential(nn.Linear(2, 8), nn.Identity(), nn.Linear(8, 3)), 2),
    "with an activation": (nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), 0),
    "with a normalisation": (nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 3)), 0),
    "a factorisation": (nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 3)), 0),
    "one layer": (nn.Linear(2, 3), 0),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear_layers_with_nothing_between_are_counted(case: str) -> None:
    model, layers = LINEAR[case]
    loss = F.cross_entropy(model(torch.randn(9, 2)), torch.arange(9) % 3)
    assert max(0, len(_all_linear(all_behind(loss.grad_fn))) - 1) == layers


def test_a_projection_under_a_classifier_is_no_linear_stack() -> None:
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 4))
    loss = F.cross_entropy(model(torch.randn(9, 64)), torch.arange(9) % 4)
    assert _all_linear(all_behind(loss.grad_fn)) == []


def padding_inside(ids: torch.Tensor, targets: torch.Tensor, **options: int) -> list[float]:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7))
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), **options)
    return [float(share) for share in _padding_inside(all_behind(loss.grad_fn), loss.grad_fn)]


def test_padding_that_is_a_word_stands_between_words() -> None:
    torch.manual_seed(0)
    words = torch.randint(0, 7, (12, 20))
    assert padding_inside(words[:, :-1], words[:, 1:])[0] > 0.5
    assert padding_inside(words[:, :-1], words[:, 1:], ignore_index=0) == []
    words = torch.randint(1, 7, (12, 20))
    words[torch.arange(20) >= torch.randint(8, 18, (12, 1))] = 0
    assert padding_inside(words[:, :-1], words[:, 1:]) == [0]
    assert padding_inside(words.flip(1)[:, :-1], words.flip(1)[:, 1:]) == [0]
    assert padding_inside(words.T[:-1], words.T[1:]) == [0]


SWAPPED_BY_VIEW: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "features and time": (lambda x: x.reshape(6, 10, 4), 1),
    "a transpose": (lambda x: x.transpose(1, 2), 0),
    "all in one row": (lambda x: x.reshape(6, 1, 40), 0),
    "pairs of steps": (lambda x: x.reshape(6, 8, 5), 0),
    "a picture as patches": (lambda x: x.view(6, 4, 2, 5).reshape(6, 10, 4), 1),
    "a picture as patches, transposed": (lambda x: x.view(6, 4, 2, 5).flatten(2).transpose(1, 2), 0),
}


@pytest.mark.parametrize("case", SWAPPED_BY_VIEW)
def test_a_view_that_should_be_a_transpose_is_named(case: str) -> None:
    change, count = SWAPPED_BY_VIEW[case]
    x = nn.Conv1d(2, 4, 1)(torch.randn(6, 2, 10))
    read = change(x)
    loss = F.cross_entropy(nn.Linear(read.shape[-1], 3)(read).mean(1), Y)
    assert len(list(_mixing(all_behind(loss.grad_fn), _rows(loss.grad_fn)))) == count
