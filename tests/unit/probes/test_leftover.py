"""A missing zero_grad, told from accumulation and from loops that clear elsewhere."""

from __future__ import annotations

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

import healthcheck
from healthcheck.core.events import EventKind
from healthcheck.probes.leftover import LeftoverProbe


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(steps: int = 5, micro: int = 1, **options) -> Watched:
    model = small()
    watched = Watched([LeftoverProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    loop.run(steps, lambda: model(torch.randn(8, 4)).pow(2).mean(), micro=micro)
    return watched


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_that_are_never_cleared_are_left_over_from_the_second_step(micro: int, clip: float | None) -> None:
    watched = trained(zero=False, micro=micro, clip=clip)
    assert watched.of("grads.leftover") == [(step, 1.0) for step in range(2, 6)]


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_loops_that_clear_are_silent(micro: int, set_to_none: bool) -> None:
    watched = trained(micro=micro, set_to_none=set_to_none)
    assert watched.of("grads.leftover") == [(step, 0.0) for step in range(2, 6)]


def test_clearing_only_every_other_step_is_seen() -> None:
    model = small()
    watched = Watched([LeftoverProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01))
    for n in range(6):
        loop.zero = n % 2 == 0
        loop.one(lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.values("grads.leftover") == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_two_optimizers_that_clear_at_different_times_are_silent() -> None:
    """The generator's gradients lie there, rightly, while the discriminator trains."""
    critic, generator = small(), nn.Linear(2, 4)
    both = nn.ModuleList([critic, generator])
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (critic, generator)]
    watched, view = Watched([LeftoverProbe()]), View(both, optimizers)
    for step in range(1, 8):
        for index, optimizer in enumerate(optimizers):
            optimizer.zero_grad(set_to_none=False)
            fake = generator(torch.randn(8, 2))
            loss = critic(fake if index else fake.detach()).mean()
            watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach())
            loss.backward()
            known = {"model": view, "optimizer": optimizer, "optimizer_index": index}
            watched.emit(EventKind.BEFORE_UPDATE, step, **known)
            optimizer.step()
            watched.emit(EventKind.AFTER_UPDATE, step, **known)
            watched.emit(EventKind.STEP_END, step, **known)
    assert set(watched.values("grads.leftover")) == {0.0}
    assert set(watched.values("grads.leftover[optimizer=1]")) == {0.0}


@pytest.mark.parametrize("own_copies", [True, False])
def test_gradients_that_the_script_sets_itself_are_not_left_over_though_nothing_clears_them(own_copies: bool) -> None:
    """Copies in full precision of half-precision weights; gradients of two losses that are put together."""
    model = small()
    weights = list(model.parameters())
    trained = [p.detach().clone() for p in weights] if own_copies else weights
    optimizer = torch.optim.SGD(trained, lr=0.01)
    watched, view = Watched([LeftoverProbe()]), View(model, [optimizer])
    for step in range(1, 5):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach())
        for p, gradient in zip(trained, torch.autograd.grad(loss, weights), strict=True):
            p.grad = gradient
        known = {"model": view, "optimizer": optimizer}
        watched.emit(EventKind.BEFORE_UPDATE, step, **known)
        optimizer.step()
        watched.emit(EventKind.AFTER_UPDATE, step, **known)
        watched.emit(EventKind.STEP_END, step, **known)
    assert watched.values("grads.leftover") == [0.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_that_are_never_cleared_are_left_over() -> None:
    """With ``create_graph`` a backward pass adds out of place."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watched, view = Watched([LeftoverProbe()]), View(model, [optimizer])
    for step in range(1, 4):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach())
        loss.backward(create_graph=True)
        known = {"model": view, "optimizer": optimizer}
        watched.emit(EventKind.BEFORE_UPDATE, step, **known)
        optimizer.step()
        watched.emit(EventKind.AFTER_UPDATE, step, **known)
        watched.emit(EventKind.STEP_END, step, **known)
    assert watched.values("grads.leftover") == [1.0, 1.0]


def test_after_a_skipped_update_nothing_is_said() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched, view = Watched([LeftoverProbe()]), View(model, [optimizer])
    for step in range(1, 5):
        loss = model(torch.randn(8, 4)).mean()
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach())
        loss.backward()
        watched.emit(EventKind.STEP_END, step, model=view, optimizer=optimizer, skipped=True)
    assert watched.samples == []


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    model = small()
    watched = Watched([LeftoverProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1), zero=False)
    loop.run(3, lambda: model(torch.randn(8, 4)).mean() * 0)
    assert watched.samples == []


def test_looking_now_and_then_judges_at_the_steps_that_are_due() -> None:
    model = small()
    watched = Watched([LeftoverProbe()], Everything(every=5))
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01), zero=False)
    loop.run(12, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.of("grads.leftover") == [(5, 1.0), (10, 1.0)]


@pytest.mark.parametrize("clear", ["first", "after the step", "in place", "never"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_loop_that_tells_its_loss_after_the_update_is_judged_by_version_counters(clear: str, clip: bool) -> None:
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"version": 1, "rules": {"pile": {"metric": "grads.leftover", "when": {"at_least": 0.5}}}}
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        for _ in range(6):
            if clear in ("first", "in place"):
                optimizer.zero_grad(set_to_none=clear == "first")
            loss = model(torch.randn(3, 4)).pow(2).mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if clear == "after the step":
                optimizer.zero_grad()
            health.step(loss=loss)
    shares = [share for _, share in health.history("grads.leftover")]
    assert shares == [1.0 if clear == "never" else 0.0] * 5
