"""Values that a loss was not made for, masks that hide nothing, outputs cut off: each beside what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from healthcheck.probes.attention import _adds_up_keys, _sees_hidden
from healthcheck.probes.data_scale import _uneven_columns
from healthcheck.probes.graph import all_behind, kind_of, why_not_finite
from healthcheck.probes.loss_mistakes import shape_mistakes
from healthcheck.probes.loss_values import MARK, grows_with, unfit
from healthcheck.probes.output_range import _clamped

N = 16
Make = Callable[[], torch.Tensor]
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
SEVERAL = (torch.arange(N * 3).reshape(N, 3) % 5 < 3).float()
ADVANTAGES = torch.randn(N, generator=torch.Generator().manual_seed(1))


def layer(given: int, made: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(given, made)


def logits() -> torch.Tensor:
    return layer(4, 3)(X)


def marked(loss: torch.Tensor, name: str) -> torch.Tensor:
    """As a watched run marks it."""
    assert loss.grad_fn is not None
    loss.grad_fn.metadata[MARK] = (name, "mean", 1.0)
    return loss


def ctc(normalise: bool) -> torch.Tensor:
    out = layer(4, 6)(torch.randn(12, 2, 4))
    given = out.log_softmax(-1) if normalise else out
    return F.ctc_loss(given, torch.randint(1, 6, (2, 3)), torch.full((2,), 12), torch.full((2,), 3))


def cosine(no: float) -> torch.Tensor:
    labels = torch.where(torch.arange(N) % 2 == 0, 1.0, no)
    return marked(F.cosine_embedding_loss(logits(), layer(4, 3)(X + 1), labels), "cosine_embedding_loss")


def ratio(old: torch.Tensor) -> torch.Tensor:
    log_p = logits().log_softmax(1)[:, 0]
    ratio = (log_p - old).exp()
    return -torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()


UNFIT: dict[str, tuple[Make, str]] = {
    "logits in ctc_loss": (lambda: ctc(False), "ctc_loss"),
    "kl_div the wrong way round": (
        lambda: F.kl_div(torch.full((N, 3), 1 / 3), logits().log_softmax(1), reduction="batchmean"),
        "kl_div",
    ),
    "kl_div from a teacher's logarithms": (
        lambda: F.kl_div(logits().log_softmax(1), torch.full((N, 3), 1 / 3).log(), reduction="batchmean"),
        "kl_div",
    ),
    "several labels in cross_entropy": (
        lambda: marked(F.cross_entropy(logits(), SEVERAL), "cross_entropy"),
        "several labels",
    ),
    "labels 0 and 1 in a cosine loss": (lambda: cosine(0.0), "cosine_embedding_loss"),
    "a policy divided by itself": (lambda: ratio(logits().log_softmax(1)[:, 0]), "ratio"),
}
FIT: dict[str, Make] = {
    "log probabilities in ctc_loss": lambda: ctc(True),
    "kl_div": lambda: F.kl_div(logits().log_softmax(1), torch.full((N, 3), 1 / 3), reduction="batchmean"),
    "kl_div of logarithms that says so": lambda: F.kl_div(
        logits().log_softmax(1), torch.full((N, 3), 1 / 3).log(), reduction="batchmean", log_target=True
    ),
    "probabilities in cross_entropy": lambda: marked(
        F.cross_entropy(logits(), SEVERAL / SEVERAL.sum(1, keepdim=True).clamp(min=1)), "cross_entropy"
    ),
    "one class each": lambda: marked(F.cross_entropy(logits(), F.one_hot(Y, 3).float()), "cross_entropy"),
    "a likelihood of several items by hand": lambda: -(logits().log_softmax(1) * SEVERAL).sum(1).mean(),
    "labels 1 and -1 in a cosine loss": lambda: cosine(-1.0),
    "a policy divided by the old one": lambda: ratio(logits().log_softmax(1)[:, 0].detach() + 0.1),
    "the first update, at which both are the same": lambda: ratio(logits().log_softmax(1)[:, 0].detach()),
}


@pytest.mark.parametrize("name", UNFIT)
def test_values_that_the_formula_rules_out_are_found(name: str) -> None:
    make, words = UNFIT[name]
    assert [said for flag, said in unfit(make().grad_fn) if flag and words in said]


@pytest.mark.parametrize("name", FIT)
def test_values_that_the_formula_takes_are_none(name: str) -> None:
    assert not [said for flag, said in unfit(FIT[name]().grad_fn) if flag]


def test_a_divergence_that_is_nan_says_which_values_it_was_given() -> None:
    loss = F.kl_div(torch.full((N, 3), 1 / 3), logits().log_softmax(1), reduction="batchmean")
    assert "kl_div from values below 0" in why_not_finite(loss.grad_fn)


MISTAKES: dict[str, tuple[Make, str]] = {
    "the rate itself in poisson_nll_loss": (lambda: F.poisson_nll_loss(F.softplus(logits()), SEVERAL), "poisson"),
    "a focal weight of the mean": (lambda: focal(F.cross_entropy(logits(), Y)), "focal"),
    "unit vectors times a temperature": (lambda: similarities(0.07), "temperature"),
}
RIGHT: dict[str, Make] = {
    "the logarithm of a rate": lambda: F.poisson_nll_loss(logits(), SEVERAL),
    "a rate that is said to be one": lambda: F.poisson_nll_loss(F.softplus(logits()), SEVERAL, log_input=False),
    "a focal weight for each row": lambda: focal(F.cross_entropy(logits(), Y, reduction="none")),
    "unit vectors over a temperature": lambda: similarities(1 / 0.07),
    "unit vectors as they are": lambda: similarities(1.0),
}


def focal(loss: torch.Tensor) -> torch.Tensor:
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def similarities(factor: float) -> torch.Tensor:
    one, other = F.normalize(logits(), dim=1), F.normalize(layer(4, 3)(X + 1), dim=1)
    return F.cross_entropy(one @ other.T * factor, torch.arange(N))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_formula_that_is_put_together_wrongly_is_found(name: str) -> None:
    make, words = MISTAKES[name]
    assert [said for said in shape_mistakes(make().grad_fn) if words in said]


@pytest.mark.parametrize("name", RIGHT)
def test_a_formula_that_only_looks_like_it_is_none(name: str) -> None:
    assert not list(shape_mistakes(RIGHT[name]().grad_fn))


@pytest.mark.parametrize(
    ("weights", "counts", "inverted"),
    [
        ([0.1, 1.0], [900, 90], False),  # ten times as much for a tenth
        ([10.0, 1.0], [900, 90], True),
        ([1.0, 1.0], [900, 90], False),
        ([1.2, 1.0], [500, 420], False),  # about as many: then it says nothing
        ([3.0, 1.0, 0.3], [3000, 1000, 300], True),
        ([0.3, 1.0, 3.0], [3000, 1000, 300], False),
        ([3.0, 0.3, 1.0], [3000, 1000, 300], False),  # no order at all
    ],
)
def test_weights_are_inverted_where_they_grow_in_proportion_to_the_counts(
    weights: list[float], counts: list[float], inverted: bool
) -> None:
    assert grows_with(weights, counts) is inverted


def attention(fill: float, over: int = -1) -> torch.Tensor:
    q, k, v = (layer(4, 8)(torch.randn(2, 6, 4)) for _ in range(3))
    scores = q @ k.transpose(1, 2) / 8**0.5
    padding = (torch.arange(6) >= 4).expand(2, 1, 6)
    return (scores.masked_fill(padding, fill).softmax(over) @ v).sum()


@pytest.mark.parametrize(("fill", "seen"), [(-1e-9, 1.0), (1e-9, 1.0), (-1e9, 0.0), (float("-inf"), 0.0), (-1e4, 0.0)])
def test_a_mask_counts_by_the_weight_that_it_leaves(fill: float, seen: float) -> None:
    nodes = all_behind(attention(fill).grad_fn)
    assert [float(_sees_hidden(node)) for node in nodes if kind_of(node) == "Softmax"] == [seen]


@pytest.mark.parametrize(("over", "wrong"), [(-1, False), (2, False), (1, True), (-2, True)])
def test_weights_have_to_add_up_over_the_keys(over: int, wrong: bool) -> None:
    nodes = all_behind(attention(-1e9, over).grad_fn)
    found = [given[1] for node in nodes if kind_of(node) == "Bmm" if (given := _adds_up_keys(node)) is not None]
    assert found == [wrong]


def test_clusters_that_share_out_their_inputs_are_no_attention() -> None:
    inputs = torch.randn(2, 6, 4)
    shares = layer(4, 6)(inputs).softmax(-1)  # each input to six clusters
    nodes = all_behind((shares.transpose(1, 2) @ layer(4, 4)(inputs)).sum().grad_fn)
    assert not [1 for node in nodes if kind_of(node) == "Bmm" and _adds_up_keys(node) is not None]


def test_outputs_outside_of_a_clamp_are_counted_and_probabilities_are_left_alone() -> None:
    out = logits()
    cut = F.mse_loss(out.clamp(0, 0.1), torch.zeros(N, 3)).grad_fn
    [(part, said)] = _clamped(cut)
    assert part == pytest.approx(float(((out < 0) | (out > 0.1)).float().mean()))
    assert said == "0 to 0.1"
    safe = F.binary_cross_entropy(out.sigmoid().clamp(0.4, 0.6), torch.ones(N, 3)).grad_fn
    assert not list(_clamped(safe))


def test_a_column_is_uneven_if_it_is_big_beside_the_others() -> None:
    table = torch.randn(64, 8)
    assert float(_uneven_columns(table)) == 1.0
    assert float(_uneven_columns(table * 3000)) < 10
    table[:, 7] = 60_000
    assert float(_uneven_columns(table)) > 10_000
