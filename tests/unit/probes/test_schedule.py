"""Jumps of the learning rate that no schedule explains, and optimizers that lost their state."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from driver import Loop, View, Watched
from torch import nn
from torch.optim import lr_scheduler

from healthcheck.core.events import EventKind
from healthcheck.probes.learning_rate import LearningRateProbe


def build(rate: float = 0.02, kind=torch.optim.Adam) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, kind(model.parameters(), lr=rate)


def train(watched: Watched, model, optimizer, steps: int, scheduler=None, start: int = 0, index: int = 0) -> int:
    loop = Loop(watched, model, optimizer, step=start)
    x = torch.randn(32, 4)
    for _ in range(steps):
        loop.one(lambda: (model(x) - x.sum(1, keepdim=True)).pow(2).mean(), index=index)
        if scheduler is not None:
            scheduler.step()
    return loop.step


def jumps(watched: Watched, index: int = 0) -> list[float]:
    name = "lr.jump" if not index else f"lr.jump[optimizer={index}]"
    return watched.values(name)


@pytest.mark.parametrize("index", [0, 1], ids=["same number", "counted as another optimizer"])
def test_a_resume_that_rebuilds_optimizer_and_schedule_is_a_jump_and_a_loss_of_state(index: int) -> None:
    watched = Watched([LearningRateProbe()])
    model, optimizer = build()
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    step = train(watched, model, optimizer, 75, scheduler)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    again, fresh = build()
    again.load_state_dict(saved)
    train(watched, again, fresh, 5, start=step, index=index)
    assert jumps(watched, index)[0 if index else -1] > 3
    replaced = "optimizer.replaced" if not index else "optimizer.replaced[optimizer=1]"
    assert watched.values(replaced)[0 if index else 75] == 1
    assert sum(watched.values(replaced)) == 1


def test_a_resume_with_state_and_schedule_is_none() -> None:
    watched = Watched([LearningRateProbe()])
    model, optimizer = build()
    step = train(watched, model, optimizer, 40)
    again, fresh = build()
    again.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    train(watched, again, fresh, 5, start=step)
    assert set(watched.values("optimizer.replaced")) == {0.0}
    assert set(jumps(watched)) == {1.0}


@pytest.mark.parametrize("same_seed", [False, True])
def test_another_fold_or_seed_is_no_resume(same_seed: bool) -> None:
    watched, step = Watched([LearningRateProbe()]), 0
    for fold in range(3):
        torch.manual_seed(0 if same_seed else fold)
        model, optimizer = build()
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        step = train(watched, model, optimizer, 50, scheduler, start=step)
    assert set(watched.values("optimizer.replaced")) == {0.0}
    assert set(jumps(watched)) == {1.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=20, T_mult=2),
        lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=10, cycle_momentum=False),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=120),
        lambda o: lr_scheduler.StepLR(o, step_size=20),
        lambda o: lr_scheduler.ConstantLR(o, factor=0.1, total_iters=30),
        lambda o: lr_scheduler.LambdaLR(o, lambda i: min(1.0, (i + 1) / 80)),
    ],
    ids=["warm restarts", "cyclic", "one cycle", "steps", "constant warm-up", "linear warm-up"],
)
def test_schedules_of_one_optimizer_are_no_jumps(make) -> None:
    watched = Watched([LearningRateProbe()])
    model, optimizer = build()
    train(watched, model, optimizer, 110, make(optimizer))
    assert set(jumps(watched)) == {1.0}


def test_a_rate_that_leaps_without_a_scheduler_is_a_jump() -> None:
    watched = Watched([LearningRateProbe()])
    model, optimizer = build(0.001)
    step = train(watched, model, optimizer, 40)
    optimizer.param_groups[0]["lr"] = 0.05
    train(watched, model, optimizer, 3, start=step)
    assert jumps(watched)[-3] == pytest.approx(50)
    assert jumps(watched)[-1] == 1


def test_a_gan_has_two_optimizers_and_no_replacement() -> None:
    watched = Watched([LearningRateProbe()])
    (one, first), (two, second) = build(), build(0.001)
    view = View(nn.ModuleList([one, two]), [first, second])
    for step in range(1, 60):
        for index, optimizer in enumerate((first, second)):
            for p in view.named_parameters():
                p[1].grad = torch.randn_like(p[1])
            known = {"model": view, "optimizer": optimizer, "optimizer_index": index}
            watched.emit(EventKind.BEFORE_UPDATE, step, **known)
            optimizer.step()
            watched.emit(EventKind.AFTER_UPDATE, step, **known)
    assert set(watched.values("optimizer.replaced") + watched.values("optimizer.replaced[optimizer=1]")) == {0.0}
    assert set(jumps(watched) + jumps(watched, 1)) == {1.0}


def test_after_a_restart_of_the_process_the_rate_is_compared_with_the_saved_one() -> None:
    before, after = LearningRateProbe(), LearningRateProbe()
    model, optimizer = build(0.001)
    train(Watched([before]), model, optimizer, 5)
    after.load_state_dict(before.state_dict())
    watched = Watched([after])
    train(watched, *build(0.004), 2)
    assert jumps(watched) == [pytest.approx(4.0)]


def test_the_old_model_can_be_freed() -> None:
    watched = Watched([LearningRateProbe()])
    model, optimizer = build()
    train(watched, model, optimizer, 30)
    gone = weakref.ref(model[0].weight)
    watched.samples.clear()
    del model, optimizer
    gc.collect()
    assert gone() is None
