"""Do the weights move? Sampled elements against the full truth."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from driver import Everything, Loop, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.device.sampling import PER_TENSOR, ElementSampler, strided_view
from healthcheck.probes.movement import PATIENCE, MovementProbe


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, **demand) -> tuple[Loop, Watched]:
    watched = Watched([MovementProbe()], Everything(**demand))
    return Loop(watched, model, optimizer), watched


def test_the_ratio_estimates_that_of_all_elements() -> None:
    model = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 10))
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    x = torch.randn(32, 100)
    loop.one(lambda: model(x).pow(2).mean())
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    truth = float((after - before).norm() / before.norm())
    assert watched.last("update_ratio") == pytest.approx(truth, rel=0.5)


def test_small_tensors_are_measured_exactly() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loop.one(lambda: model.weight.sum())
    assert watched.last("update_ratio") == pytest.approx(0.5)
    assert watched.last("update_ratio[weight]") == pytest.approx(0.5)


def test_weights_that_were_all_zero_give_a_finite_ratio() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.5))
    loop.one(lambda: model.weight.sum())
    assert watched.last("update_ratio") == 1.0


class Frozen(torch.optim.SGD):
    """An optimizer whose step forgets a parameter: a fault that leaves the gradient in place."""

    forgotten: nn.Parameter

    def step(self, closure=None):
        kept = self.forgotten.detach().clone()
        super().step(closure)
        self.forgotten.data.copy_(kept)


def test_a_tensor_that_never_moves_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = Frozen(model.parameters(), lr=0.1)
    optimizer.forgotten = model[1].weight
    loop, watched = watch(model, optimizer)
    loop.run(8, lambda: model(torch.randn(4, 4)).pow(2).mean())
    assert watched.of("params.unmoved")[0] == (PATIENCE, 1.0)
    assert watched.facts("params.unmoved")["which"] == "1.weight"


def test_a_tensor_without_gradient_does_not_move_either() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    loop, watched = watch(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loop.run(8, lambda: model[0](torch.randn(4, 4)).pow(2).mean())
    assert watched.last("params.unmoved") == 2


def test_heads_that_take_turns_between_two_looks_stand_still_for_nobody() -> None:
    body, one, two = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
    model = nn.ModuleList([body, one, two])
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4)
    for n in range(40):  # looked at in every fourth step: each time it is the same head's turn
        loop.one(lambda n=n: (one if n % 4 else two)(body(torch.randn(4, 4))).pow(2).mean())
    assert watched.values("params.unmoved")
    assert set(watched.values("params.unmoved")) == {0.0}


def test_a_model_that_has_learnt_all_there_is_does_not_stand_still() -> None:
    model = nn.Linear(4, 1)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.3))
    inputs = torch.randn(256, 4)
    targets = inputs.sum(1, keepdim=True)
    loop.run(150, lambda: nn.functional.mse_loss(model(inputs), targets))
    assert nn.functional.mse_loss(model(inputs), targets).item() < 1e-10
    assert set(watched.values("params.unmoved")) == {0.0}


def test_a_part_that_stood_still_before_the_rest_had_converged_stays_named() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 1e-12}]
    )
    loop, watched = watch(model, optimizer)
    inputs = torch.randn(256, 4)
    loop.run(20, lambda: nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))
    assert watched.last("params.unmoved") == 2.0


class Pooler(nn.Linear):
    """As a library ends its model with."""


@pytest.mark.parametrize(("library", "unmoved"), [("transformers.models.bert.modeling_bert", 0.0), ("__main__", 2.0)])
def test_a_librarys_pooler_that_the_task_leaves_out_is_silent_and_ones_own_is_not(
    library: str, unmoved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pooler, "__module__", library)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "pooler": Pooler(4, 4)})
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(10, lambda: model["body"](torch.randn(4, 4)).pow(2).mean())
    assert watched.last("params.unmoved") == unmoved


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_frozen_parts_and_a_rate_of_zero_are_silent(rate: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=rate))
    loop.run(8, lambda: model(torch.randn(4, 4)).pow(2).mean())
    assert set(watched.values("params.unmoved")) == {0.0}


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_an_embedding_that_no_batch_uses_are_silent(sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(10_000, 8, sparse=sparse))
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(8, lambda: model(torch.tensor([1, 2, 3])).pow(2).sum())
    assert set(watched.values("params.unmoved")) == {0.0}


def test_updates_that_the_scaler_skipped_are_no_standstill() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop, watched = watch(model, optimizer)
    model.weight.grad = torch.ones_like(model.weight)
    for step in range(1, 20):
        for kind in (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE):
            watched.emit(kind, step, model=loop.view, optimizer=optimizer, skipped=True)
    assert watched.samples == []


@pytest.mark.parametrize(("rate", "lost"), [(1e-6, True), (0.5, False)])
def test_updates_that_round_away_in_bfloat16(rate: float, lost: bool) -> None:
    model = nn.Linear(64, 64).bfloat16()
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=rate))
    loop.run(3, lambda: model(torch.randn(8, 64).bfloat16()).pow(2).mean() * 10)
    share = watched.last("updates.lost")
    assert (share > 0.9) if lost else (share < 0.5)


def test_full_precision_weights_lose_nothing_to_half_precision() -> None:
    model = nn.Linear(8, 8)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=1e-12))
    loop.run(3, lambda: model(torch.randn(8, 8)).pow(2).mean())
    assert "updates.lost" not in watched.names()


def test_nothing_is_read_at_steps_that_no_rule_wants() -> None:
    model = nn.Linear(8, 8)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), only={"update_ratio"}, every=10)
    loop.run(25, lambda: model(torch.randn(8, 8)).pow(2).mean())
    assert [step for step, _ in watched.of("update_ratio")] == [10, 20]


def test_a_replaced_optimizer_and_its_model_can_be_freed() -> None:
    model = nn.Linear(8, 2)
    loop, watched = watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(2, lambda m=model: m(torch.randn(4, 8)).mean())
    gone = weakref.ref(model.weight)
    watched.samples.clear()
    other = nn.Linear(8, 2)
    del model, loop
    gc.collect()
    later = Loop(watched, other, torch.optim.SGD(other.parameters(), lr=0.1))
    later.one(lambda: other(torch.randn(4, 8)).mean())
    watched.samples.clear()
    gc.collect()
    assert gone() is None


def test_elements_are_spread_and_read_in_place() -> None:
    tensor = torch.arange(128 * 128, dtype=torch.float32).reshape(128, 128)
    view = strided_view(tensor, PER_TENSOR)
    assert view.data_ptr() == tensor.data_ptr()
    assert len({int(v) % 128 for v in view}) > PER_TENSOR // 2  # not all in one column


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_and_weight_are_read_at_the_same_elements(layout: torch.memory_format) -> None:
    weight = nn.Parameter(torch.randn(8, 6, 3, 3).to(memory_format=layout))
    weight.grad = weight.detach().contiguous().clone()
    sampler = ElementSampler([weight])
    assert torch.equal(sampler.weights()[0].values, sampler.gradients()[0].values)


def test_a_tensor_with_gaps_is_read_by_copy() -> None:
    wide = torch.arange(20.0).reshape(4, 5)[:, :3]
    assert strided_view(wide, 64).tolist() == wide.flatten().tolist()
