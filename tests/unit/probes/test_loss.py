"""The loss of a step: micro-batches combined, NaN never hidden, best and chance level."""

from __future__ import annotations

import math

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.loss import LossProbe


def scripted(*values: float):
    """A loss with the given values, one per call, that still has a gradient."""
    weight = nn.Linear(1, 1)
    left = iter(values)
    return weight, lambda: weight.weight.sum() * 0 + next(left)


def loop_of(model: nn.Module, **options) -> tuple[Loop, Watched]:
    watched = Watched([LossProbe()])
    return Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0), **options), watched


def test_micro_batches_are_averaged_where_the_loop_does_not_divide() -> None:
    model, loss = scripted(1.0, 3.0, 5.0, 7.0)
    loop, watched = loop_of(model)
    loop.run(2, loss, micro=2)
    assert watched.of("loss") == [(1, 2.0), (2, 6.0)]


def test_micro_batches_are_added_where_the_trainer_divided_them() -> None:
    model, loss = scripted(1.0, 3.0)
    loop, watched = loop_of(model)
    loop.one(loss, micro=2, loss_weight=1.0)
    assert watched.of("loss") == [(1, 4.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_micro_batch_makes_the_step_non_finite(bad: float) -> None:
    model, loss = scripted(1.0, bad, 1.0, 1.0)
    loop, watched = loop_of(model)
    loop.one(loss, micro=4)
    assert not math.isfinite(watched.last("loss"))


def test_the_loss_is_known_before_the_update() -> None:
    """Otherwise no rule could keep a bad update from happening."""
    watched = Watched([LossProbe()])
    watched.emit(EventKind.LOSS, 1, loss=torch.tensor(2.0))
    watched.emit(EventKind.BEFORE_UPDATE, 1)
    assert watched.of("loss") == [(1, 2.0)]


def test_a_skipped_update_still_has_its_loss() -> None:
    watched = Watched([LossProbe()])
    watched.emit(EventKind.LOSS, 1, loss=torch.tensor(2.0))
    watched.emit(EventKind.STEP_END, 1, skipped=True)
    assert watched.of("loss") == [(1, 2.0)]


def test_a_framework_that_reports_the_step_loss_is_believed_only_without_losses_of_its_own() -> None:
    watched = Watched([LossProbe()])
    watched.emit(EventKind.STEP_END, 1, loss=0.5)
    watched.emit(EventKind.LOSS, 2, loss=torch.tensor(2.0))
    watched.emit(EventKind.BEFORE_UPDATE, 2)
    watched.emit(EventKind.STEP_END, 2, loss=99.0)
    assert watched.of("loss") == [(1, 0.5), (2, 2.0)]


def test_two_optimizers_have_two_series() -> None:
    watched = Watched([LossProbe()])
    for index, value in enumerate((1.0, 7.0)):
        watched.emit(EventKind.LOSS, 1, loss=torch.tensor(value))
        watched.emit(EventKind.BEFORE_UPDATE, 1, optimizer_index=index)
        watched.emit(EventKind.STEP_END, 1, optimizer_index=index)
    assert watched.values("loss") == [1.0]
    assert watched.values("loss[optimizer=1]") == [7.0]


def test_best_loss_skips_what_is_not_finite() -> None:
    model, loss = scripted(3.0, math.nan, 2.0, 5.0)
    loop, watched = loop_of(model)
    loop.run(4, loss)
    assert watched.values("loss.best") == [3.0, 3.0, 2.0, 2.0]


def test_best_loss_survives_a_resume() -> None:
    first, second = LossProbe(), LossProbe()
    before, after = Watched([first]), Watched([second])
    before.emit(EventKind.STEP_END, 1, loss=0.25)
    second.load_state_dict(first.state_dict())
    after.emit(EventKind.STEP_END, 2, loss=0.75)
    assert after.last("loss.best") == 0.25


def test_chance_level_compares_with_guessing_among_the_classes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))
    loop, watched = loop_of(model)
    loop.one(lambda: model(torch.zeros(1, 4)).sum() * 0 + math.log(10))
    assert watched.last("loss.chance") == pytest.approx(1.0)


def test_a_regression_head_has_no_chance_level() -> None:
    model = nn.Linear(4, 1)
    loop, watched = loop_of(model)
    loop.one(lambda: model(torch.ones(1, 4)).sum())
    assert "loss.chance" not in watched.names()


def with_graph(model: nn.Module, losses) -> Watched:
    """Steps whose losses come with their graphs, as from a real backward pass."""
    watched, view = Watched([LossProbe()]), View(model)
    for step, loss in enumerate(losses, 1):
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach(), loss_graph=loss.grad_fn)
        watched.emit(EventKind.BEFORE_UPDATE, step, model=view)
    return watched


class Own(torch.autograd.Function):
    """Nobody can see what it computes."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return nn.functional.cross_entropy(z, LABELS)

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(ctx.saved_tensors[0])


HEAD = nn.Linear(4, 10)
LABELS = torch.arange(8)


@pytest.mark.parametrize(
    ("loss", "has_one"),
    [
        (lambda z: nn.functional.cross_entropy(z, LABELS), True),
        (lambda z: nn.functional.cross_entropy(z, LABELS, label_smoothing=0.1), True),
        (lambda z: -(z.log_softmax(1) * z.detach().softmax(1)).sum(1).mean(), True),
        (lambda z: nn.functional.mse_loss(z, torch.ones(8, 10)), False),
        (lambda z: nn.functional.softplus(z[:, 0]).mean() + nn.functional.softplus(-z[:, 1]).mean(), False),
        (lambda z: nn.functional.binary_cross_entropy_with_logits(z, torch.ones(8, 10)), False),
        (lambda z: nn.functional.cross_entropy(z @ z.T, LABELS), False),
        (lambda z: torch.stack([-z.log_softmax(1).gather(1, LABELS[:, None]).mean(), z.new_ones(())]).mean(), True),
        (lambda z: Own.apply(z), True),
        (lambda z: (z.T @ z - torch.eye(10)).square().sum(), False),
        (lambda z: z[:4].mean() - z[4:].mean(), False),
    ],
    ids=[
        "classes",
        "smoothed",
        "soft labels",
        "numbers",
        "two sides of a game",
        "yes or no",
        "rows of the batch",
        "by hand",
        "a kernel of its own",
        "correlations",
        "a critic",
    ],
)
def test_only_what_may_be_a_cross_entropy_over_the_last_layer_is_compared_with_guessing(loss, has_one: bool) -> None:
    watched = with_graph(HEAD, [loss(HEAD(torch.randn(8, 4)))])
    assert ("loss.chance" in watched.names()) is has_one


def test_where_a_run_began_is_told_by_its_first_losses() -> None:
    told = 20.0 * nn.functional.one_hot(LABELS, 10).float().requires_grad_()
    torch.manual_seed(0)
    fresh = (nn.functional.cross_entropy(0.01 * HEAD(torch.randn(8, 4)), LABELS) for _ in range(8))
    assert with_graph(HEAD, fresh).values("loss.start") == pytest.approx([1.0] * 5, abs=0.02)
    knowing = (nn.functional.cross_entropy(told * 1.0, LABELS) for _ in range(8))
    assert with_graph(HEAD, knowing).last("loss.start") < 0.01
    numbers = (nn.functional.mse_loss(HEAD(torch.randn(8, 4)), torch.ones(8, 10)) for _ in range(8))
    assert with_graph(HEAD, numbers).values("loss.start") == [1.0] * 5


def test_what_nobody_wants_is_not_computed() -> None:
    model = nn.Linear(4, 2)
    watched = Watched([LossProbe()], Everything({"loss"}))
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).one(lambda: model(torch.ones(1, 4)).sum())
    assert watched.names() == {"loss"}


def test_a_bad_loss_names_the_gradients_and_tells_whether_the_weights_are_safe() -> None:
    model = nn.Linear(4, 2)
    loop, watched = loop_of(model)
    loop.one(lambda: model(torch.full((1, 4), math.nan)).sum())
    facts = watched.facts("loss")
    assert facts["first"] == "weight, 8 of 8 values"
    assert facts["tensors"] == "1 of 2 gradients not finite"
    assert facts["weights"].startswith("1 of 2 tensors not finite") or facts["weights"] == "finite"


@pytest.mark.parametrize(("after", "ratio"), [(0.02, 1.0), (2.0, 100.0)], ids=["goes on", "starts anew"])
def test_the_loss_after_a_resume_is_compared_with_the_one_before(after: float, ratio: float) -> None:
    first, second = LossProbe(), LossProbe()
    before = Watched([first])
    for step in range(1, 61):
        before.emit(EventKind.STEP_END, step, loss=0.02)
    assert "loss.resumed" not in before.names()
    second.load_state_dict(first.state_dict())
    resumed = Watched([second])
    for step in range(61, 121):
        resumed.emit(EventKind.STEP_END, step, loss=after)
    assert resumed.of("loss.resumed") == [(80, pytest.approx(ratio))]


def test_a_loss_that_comes_before_the_end_of_the_step_before_is_kept_for_its_own_step() -> None:
    """With optimizers that take turns, the old step ends only when the next one has begun."""
    watched = Watched([LossProbe()])
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0)):
        watched.emit(EventKind.LOSS, max(1, step - 1), loss=torch.tensor(value))
        if step > 1:
            watched.emit(EventKind.STEP_END, step - 1)
        watched.emit(EventKind.BEFORE_UPDATE, step)
        watched.emit(EventKind.AFTER_UPDATE, step)
    assert watched.of("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
