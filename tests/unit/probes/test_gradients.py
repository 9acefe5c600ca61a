"""Gradient norms: before clipping, overflow is not NaN, and the guilty parameter has a name."""

from __future__ import annotations

import math

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.device.tensors import l2_norms, nonfinite_counts
from healthcheck.probes.gradient_statistics import gradient_stats
from healthcheck.probes.gradients import GradientProbe


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).sum() * self.scale.sum()


def watch(model: nn.Module, *, only: set[str] | None = None, **options) -> tuple[Loop, Watched]:
    watched = Watched([GradientProbe()], Everything(only))
    return Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01), **options), watched


def norm_of(model: nn.Module) -> float:
    grads = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return float(torch.cat(grads).norm())


def test_the_norm_is_that_of_all_gradients_together() -> None:
    model = Head()
    loop, watched = watch(model)
    loop.one(lambda: model(torch.randn(2, 4)))
    assert watched.last("grad_norm") == pytest.approx(norm_of(model), rel=1e-6)
    parts = [watched.last(f"grad_norm[{n}]") for n in ("body.weight", "body.bias", "scale")]
    assert math.hypot(*parts) == pytest.approx(watched.last("grad_norm"), rel=1e-6)


def test_the_norm_is_the_one_before_clipping() -> None:
    model = Head()
    loop, watched = watch(model, clip=0.5)
    x = torch.randn(2, 4)
    loop.one(lambda: model(x))
    assert norm_of(model) == pytest.approx(0.5, rel=1e-3)
    assert watched.last("grad_norm") > 1.0
    assert watched.last("grad_norm[scale]") > 0.5


def test_under_a_loss_scale_gradients_are_read_when_they_are_unscaled() -> None:
    model = nn.Linear(2, 1, bias=False)
    watched = Watched([GradientProbe()])
    view = View(model)
    model.weight.grad = torch.tensor([[3.0, 4.0]]) * 65536
    watched.emit(EventKind.BACKWARD_END, 1, model=view, loss_scale=65536.0)
    assert watched.samples == []
    model.weight.grad /= 65536
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=view, loss_scale=65536.0)
    assert watched.of("grad_norm") == [(1, 5.0)]


def test_a_fused_step_under_a_scaler_has_its_scale_taken_out() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.grad_scale = torch.tensor(1024.0)
    model.weight.grad = torch.tensor([[3.0, 4.0]]) * 1024
    watched = Watched([GradientProbe()])
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(model), optimizer=optimizer, loss_scale=1024.0)
    assert watched.last("grad_norm") == pytest.approx(5.0)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_finite_gradients_whose_float32_norm_overflows_are_not_called_infinite(clip: float | None) -> None:
    model = nn.Linear(4, 1, bias=False)
    loop, watched = watch(model, clip=clip)
    loop.one(lambda: (model.weight * 1e25).sum())
    assert watched.last("grad_norm") == pytest.approx(2e25, rel=1e-6)
    assert watched.last("grad_norm[weight]") == pytest.approx(2e25, rel=1e-6)
    assert watched.last("grad_nonfinite") == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_first_bad_parameter_is_named_although_clipping_spreads_it(bad: float, clip: float | None) -> None:
    model = Head()
    loop, watched = watch(model, clip=clip)
    factor = torch.ones(64)
    factor[7] = bad
    loop.one(lambda: (model.scale * factor).sum() + model.body(torch.ones(1, 4)).sum())
    assert not math.isfinite(watched.last("grad_norm"))
    assert watched.last("grad_nonfinite") == 1
    assert watched.facts("grad_norm") == {"first": "scale, 1 of 64 values", "tensors": "1 of 3 gradients not finite"}


def test_no_gradient_gives_no_norm() -> None:
    watched = Watched([GradientProbe()])
    watched.emit(EventKind.BACKWARD_END, 1, model=View(nn.Linear(2, 2)))
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(nn.Linear(2, 2)))
    assert watched.samples == []


def test_each_step_is_measured_once() -> None:
    model = Head()
    loop, watched = watch(model, clip=1.0)
    loop.run(3, lambda: model(torch.randn(2, 4)))
    assert [step for step, _ in watched.of("grad_norm")] == [1, 2, 3]


def test_the_family_is_given_only_when_due() -> None:
    model = Head()
    watched = Watched([GradientProbe()], Everything(every=2))
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01)).run(4, lambda: model(torch.randn(2, 4)))
    assert [step for step, _ in watched.of("grad_norm[scale]")] == [2, 4]
    assert len(watched.of("grad_norm")) == 4


def test_a_second_optimizer_is_measured_by_its_own_parameters() -> None:
    """In a GAN the generator's pass leaves gradients on the discriminator."""
    one, two = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    both = nn.ModuleList([one, two])
    watched = Watched([GradientProbe()])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    one.weight.grad, two.weight.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])
    view = View(both, optimizers)
    for index, optimizer in enumerate(optimizers):
        watched.emit(EventKind.BEFORE_UPDATE, 1, model=view, optimizer=optimizer, optimizer_index=index)
    assert watched.of("grad_norm") == [(1, 5.0)]
    assert watched.of("grad_norm[optimizer=1]") == [(1, 10.0)]


def test_zero_gradients_are_counted_and_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.constant_(model[0].bias, -100.0)
    loop, watched = watch(model)
    loop.one(lambda: model(torch.randn(4, 3)).pow(2).sum())
    assert watched.last("grads.zero") == 3
    assert watched.facts("grads.zero")["which"] == "0.weight, 0.bias, 2.weight"


def test_layer_ratio_compares_first_and_last_matrix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.grad, model[1].weight.grad = torch.full((2, 2), 8.0), torch.full((2, 2), 0.1)
    watched = Watched([GradientProbe()])
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(model))
    assert watched.last("grad.layer_ratio") == pytest.approx(80.0)


def given(*gradients: torch.Tensor | None) -> list[nn.Parameter]:
    params = []
    for g in gradients:
        p = nn.Parameter(torch.zeros(1 if g is None else g.shape, dtype=None if g is None else g.dtype))
        p.grad = g
        params.append(p)
    return params


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_types_are_accumulated_in_more_than_their_own_precision(dtype: torch.dtype) -> None:
    g = torch.full((10_000,), 0.25, dtype=dtype)
    stats = gradient_stats(given(g))
    assert stats.norm == pytest.approx(25.0, rel=1e-5)


def test_types_and_layouts_mix() -> None:
    """A sparse gradient counts by its summed rows: row 0 was looked up twice."""
    params = given(torch.tensor([3.0 + 4.0j]), None, torch.tensor([12.0], dtype=torch.bfloat16))
    embedding = nn.Embedding(5, 1, sparse=True)
    (embedding(torch.tensor([0, 0, 2])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert embedding.weight.grad.is_sparse
    stats = gradient_stats([*params, embedding.weight])
    assert stats.indices == [0, 2, 3]
    assert stats.row("norm") == [5.0, 12.0, 5.0]
    assert stats.norm == pytest.approx(math.sqrt(25 + 144 + 25))


def test_nothing_to_measure_is_none_not_zero() -> None:
    assert gradient_stats(given(None)) is None


def test_non_finite_elements_are_counted_tensor_by_tensor() -> None:
    counts = nonfinite_counts([torch.tensor([1.0, math.nan]), torch.tensor([math.inf, -math.inf, 0.0])])
    assert counts.tolist() == [1, 2]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", ["flat", "transposed", "a row more", "with a tail"])
def test_norms_of_large_tensors_on_the_host_are_those_of_float64(kind: torch.dtype, made: str) -> None:
    torch.manual_seed(0)
    large = torch.randn(2000, 1500).to(kind)
    tensor = {
        "flat": large.flatten(),
        "transposed": large.t(),
        "a row more": large[1:],
        "with a tail": large.flatten()[:-77],
    }[made]
    small = torch.randn(5).to(kind)
    norms = l2_norms([small, tensor])
    expected = [small.double().norm(), tensor.double().norm()]
    assert norms.tolist() == pytest.approx([float(e) for e in expected], rel=1e-6)


def test_a_large_tensor_that_overflows_or_holds_a_nan_keeps_its_norm() -> None:
    tensor = torch.full((1_000_000,), 1e30)
    assert float(l2_norms([tensor])) == pytest.approx(1e33)
    tensor[5] = float("nan")
    assert l2_norms([tensor]).isnan().all()
