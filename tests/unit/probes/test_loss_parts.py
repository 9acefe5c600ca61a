"""What the graph of a loss tells of its parts: its sign, the answers and targets it was computed from, a latent code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Everything, Watched
from torch import nn
from torch.nn import functional as F

from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Probe
from healthcheck.probes.loss_construction import LossSignProbe
from healthcheck.probes.predictions import LatentProbe, PredictionProbe

N = 32
CLASSES = torch.arange(N) % 4
Build = Callable[[torch.Tensor], torch.Tensor]


def look(probe: Probe, *losses: torch.Tensor, maximize: bool = False, key: str | None = None) -> Watched:
    watched = Watched([probe], Everything({key} if key else None))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, maximize=maximize)
    for step, loss in enumerate(losses, 1):
        watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
    return watched


def logits() -> torch.Tensor:
    return nn.Linear(8, 4)(torch.randn(N, 8))


# --- sign ------------------------------------------------------------------------------------------------------------

MADE_LARGER: dict[str, Build] = {
    "negated": lambda z: -F.cross_entropy(z, CLASSES),
    "times minus one half": lambda z: F.cross_entropy(z, CLASSES) * -0.5,
    "subtracted": lambda z: 1 - F.mse_loss(z, torch.zeros(N, 4)),
    "divided by a negative number": lambda z: F.smooth_l1_loss(z, torch.zeros(N, 4)) / -2,
    "two terms": lambda z: -(F.cross_entropy(z, CLASSES) + 0.1 * F.mse_loss(z, torch.zeros(N, 4))),
    "scaled": lambda z: -F.cross_entropy(z, CLASSES) * torch.tensor(65536.0),
}
LEFT_ALONE: dict[str, Build] = {
    "an error": lambda z: F.cross_entropy(z, CLASSES),
    "a difference of two errors": lambda z: F.cross_entropy(z, CLASSES) - F.mse_loss(z, torch.zeros(N, 4)),
    "an error against a reward": lambda z: -F.cross_entropy(z, CLASSES) + z.mean(),
    "policy gradient": lambda z: -(z.log_softmax(1)[:, 0] * torch.randn(N)).mean(),
    "a penalty on confidence": lambda z: F.cross_entropy(z, CLASSES) + (z.softmax(1) * z.log_softmax(1)).sum(1).mean(),
    "a likelihood that may be negative": lambda z: -F.nll_loss(z * z, CLASSES),
}


@pytest.mark.parametrize("case", MADE_LARGER)
def test_an_error_that_is_made_larger_is_told(case: str) -> None:
    watched = look(LossSignProbe(), MADE_LARGER[case](logits()))
    assert watched.values("loss.maximised") == [1.0]
    assert watched.facts("loss.maximised") == {"loss": "negated"}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_no_plain_error_or_is_made_smaller_is_left_alone(case: str) -> None:
    assert look(LossSignProbe(), LEFT_ALONE[case](logits())).values("loss.maximised") == [0.0]


def test_an_optimizer_that_maximises_turns_the_sign_round() -> None:
    error = F.cross_entropy(logits(), CLASSES)
    assert look(LossSignProbe(), error, maximize=True).values("loss.maximised") == [1.0]
    assert look(LossSignProbe(), -error, maximize=True).values("loss.maximised") == [0.0]


def test_the_sign_is_looked_at_a_few_times_only() -> None:
    probe = LossSignProbe()
    look(probe, *(F.cross_entropy(logits(), CLASSES) for _ in range(6)))
    assert probe.rests_until > 10**9


# --- answers ---------------------------------------------------------------------------------------------------------


def spread(loss: torch.Tensor) -> list[float]:
    return look(PredictionProbe(), loss).values("predictions.spread")


def test_answers_that_do_not_depend_on_the_input_have_no_spread() -> None:
    same = logits()[:1].expand(N, 4)
    assert spread(F.cross_entropy(same, CLASSES)) == [0.0]
    assert spread(F.mse_loss(same, torch.randn(N, 4))) == [0.0]
    assert spread(F.binary_cross_entropy_with_logits(same, torch.rand(N, 4))) == [0.0]
    assert spread(F.cross_entropy(logits(), CLASSES) + F.mse_loss(same, torch.randn(N, 4))) == [0.0]


def test_answers_that_differ_have_one_that_is_told_in_nats_or_in_the_targets_own() -> None:
    assert spread(F.cross_entropy(logits(), CLASSES))[0] > 0.05
    targets = torch.randn(N, 1)
    assert spread(F.mse_loss((targets / 2).requires_grad_(), targets))[0] == pytest.approx(0.5)


def test_targets_that_do_not_differ_ask_for_one_answer() -> None:
    same = logits()[:1].expand(N, 4)
    assert spread(F.cross_entropy(same, torch.zeros(N, dtype=torch.long))) == [1.0]
    assert spread(F.mse_loss(same, torch.ones(N, 4))) == [1.0]


@pytest.mark.parametrize(
    "compare",
    [
        lambda a, b: -F.cosine_similarity(a, b).mean(),
        lambda a, b: 2 - 2 * (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1).mean(),
        lambda a, b: F.triplet_margin_loss(a, b, a.flip(0)),
    ],
    ids=["cosine", "written out", "triplet"],
)
def test_vectors_that_a_loss_compares_are_found_and_told_apart(compare: Callable[..., torch.Tensor]) -> None:
    one, other = (nn.Linear(8, 6)(torch.randn(N, 8)) for _ in range(2))
    apart = look(PredictionProbe(), compare(one, other)).last("embeddings.spread")
    point = one[:1].expand(N, 6) + 0.0
    together = look(PredictionProbe(), compare(point, point * 1.0001)).last("embeddings.spread")
    assert apart > 0.02
    assert together < 1e-5


def test_a_plain_classifier_compares_no_vectors() -> None:
    assert "embeddings.spread" not in look(PredictionProbe(), F.cross_entropy(logits(), CLASSES)).names()


def test_labels_of_one_class_are_counted_under_a_linear_layer() -> None:
    zeros = torch.zeros(N, dtype=torch.long)
    alike = [F.cross_entropy(logits(), zeros) for _ in range(3)]
    mixed = F.cross_entropy(logits(), CLASSES)
    assert look(PredictionProbe(), *alike, mixed, alike[0]).values("targets.one_class") == [N, 2 * N, 3 * N, 0, N]
    contrastive = F.cross_entropy(torch.cat([logits(), logits()], 1) / 0.1, zeros)
    assert look(PredictionProbe(), contrastive).values("targets.one_class") == [0]


def test_labels_of_two_classes_count_less_and_those_left_out_do_not() -> None:
    two = nn.Linear(8, 2)(torch.randn(N, 8))
    assert look(PredictionProbe(), F.cross_entropy(two, CLASSES * 0)).last("targets.one_class") == pytest.approx(N / 10)
    left_out = F.cross_entropy(logits(), torch.full((N,), -100))
    assert look(PredictionProbe(), left_out).last("targets.one_class") == 0


def test_targets_in_their_thousands_are_told_in_times_of_the_answers() -> None:
    small = logits()
    size = float(small.detach().square().mean().sqrt())
    far = look(PredictionProbe(), F.mse_loss(small, torch.full((N, 4), 5e4))).last("targets.reach")
    assert far == pytest.approx(5e4 / size, rel=0.01)
    assert look(PredictionProbe(), F.mse_loss(small, torch.full((N, 4), 5.0))).last("targets.reach") == 0


def test_a_loss_under_activation_checkpointing_is_looked_at_without_harm() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = nn.Linear(8, 4), torch.randn(N, 8)
    loss = checkpoint(lambda: F.cross_entropy(layer(x), CLASSES), use_reentrant=False)
    look(PredictionProbe(), loss)
    loss.backward()
    taken = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    F.cross_entropy(layer(x), CLASSES).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(taken, layer.parameters(), strict=True) if p.grad is not None)


# --- latent code -----------------------------------------------------------------------------------------------------


def coded(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (scale * torch.randn(N, 3)).requires_grad_()
    return mean, (scale * torch.randn(N, 3)).requires_grad_()


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "as usual": lambda m, v: -0.5 * torch.sum(1 + v - m.pow(2) - v.exp()),
    "squares by hand": lambda m, v: 0.5 * (m * m + v.exp() - v - 1).sum(1).mean(),
    "distributions": lambda m, v: (
        torch.distributions.kl_divergence(
            torch.distributions.Normal(m, (0.5 * v).exp()), torch.distributions.Normal(0.0, 1.0)
        )
        .sum(1)
        .mean()
    ),
}


@pytest.mark.parametrize("case", DIVERGENCES)
def test_the_divergence_of_a_code_is_found_beside_the_error_and_computed(case: str) -> None:
    mean, log_variance = coded(0.5)
    loss = F.mse_loss(nn.Linear(3, 8)(mean), torch.randn(N, 8)) + 0.1 * DIVERGENCES[case](mean, log_variance)
    expected = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).sum(1).mean()
    assert look(LatentProbe(), loss).last("latent.kl") == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    "build",
    [
        lambda z: F.cross_entropy(z, CLASSES),
        lambda z: (z.exp() - z - 1).mean(),
        lambda z: (z.exp() * torch.randn(N, 4)).mean() + z.pow(2).mean(),
    ],
    ids=["classifier", "a divergence of policies", "a ratio and an error"],
)
def test_losses_without_a_code_have_no_such_metric(build: Build) -> None:
    assert look(LatentProbe(), build(logits())).samples == []


def test_answers_that_are_masked_leave_a_number() -> None:
    views = F.normalize(nn.Linear(8, 4)(torch.randn(N, 8)), dim=1)
    alike = views @ views.T / 0.1
    alike.fill_diagonal_(-torch.inf)
    watched = look(PredictionProbe(), F.cross_entropy(alike, torch.arange(N).roll(1)), key="predictions.spread")
    assert watched.last("predictions.spread") > 0.01
