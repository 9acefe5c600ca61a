"""Mistakes that the first hundred steps of a loop show: eval mode from the start, gradients thrown away between
micro-batches, an optimizer for each update, a schedule that gets nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Everything, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.learning_rate import ScheduleReachProbe
from healthcheck.probes.modes import EvalStartProbe
from healthcheck.probes.optimizers import RebuiltOptimizerProbe
from healthcheck.probes.step_order import DiscardedGradientProbe


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


# --- eval mode from the start ----------------------------------------------------------------------------------------


def never_in_train(model: nn.Module, trained: nn.Module | None = None) -> float:
    watched = Watched([EvalStartProbe()])
    optimizer = torch.optim.SGD((trained or model).parameters(), lr=0.1)
    model(torch.randn(16, 4)).sum().backward()
    watched.emit(EventKind.BEFORE_UPDATE, 1, model=View(model), optimizer=optimizer)
    return watched.last("modules.never_in_train")


def test_a_model_that_is_trained_in_eval_mode_as_a_whole_is_told() -> None:
    assert never_in_train(layers().eval()) == 2


def test_a_model_in_train_mode_is_not() -> None:
    assert never_in_train(layers()) == 0


def test_batch_norm_with_statistics_of_its_own_and_a_part_in_eval_mode_are_left_alone() -> None:
    model = layers()
    model(torch.randn(64, 4))
    model[1].eval()
    model[2].eval()
    assert never_in_train(model) == 0


def test_a_layer_that_is_switched_by_itself_is_left_alone() -> None:
    model = layers()
    model[1].eval()
    assert never_in_train(model) == 0


def test_a_model_that_went_into_eval_mode_after_training_began_is_left_alone() -> None:
    """That is the business of ``modules.in_eval``, also where the first evaluation comes before the first look."""
    watched, model = Watched([EvalStartProbe()]), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.emit(EventKind.TRAIN_START, 0, model=View(model))
    model.eval()
    for step in (1, 2):
        model(torch.randn(16, 4)).sum().backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model), optimizer=optimizer)
    assert watched.values("modules.never_in_train") == [0, 0]


def test_a_frozen_backbone_and_a_model_that_another_optimizer_does_not_train_are_left_alone() -> None:
    model = layers().eval()
    for part in (model[0], model[1]):
        part.requires_grad_(False)
    assert never_in_train(model) == 0
    assert never_in_train(layers().eval(), trained=nn.Linear(1, 1)) == 0


# --- gradients thrown away between micro-batches ---------------------------------------------------------------------


def discarded(*, clear: bool, divide: bool, batches: int = 0, to_none: bool = True) -> list[float]:
    watched = Watched([DiscardedGradientProbe()])
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 5):
        for micro in range(3):
            if micro < batches:
                watched.emit(EventKind.BATCH_READY, step)
            if clear or micro == 0:
                optimizer.zero_grad(set_to_none=to_none)
            loss = model(torch.randn(8, 4)).square().mean()
            loss = loss / 3 if divide else loss
            watched.emit(EventKind.LOSS, step, loss=loss.detach(), loss_graph=loss.grad_fn)
            loss.backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
        optimizer.step()
    watched.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return watched.values("grads.discarded")


@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_whose_gradients_are_cleared_are_told_where_the_loss_is_divided(to_none: bool) -> None:
    assert discarded(clear=True, divide=True, to_none=to_none) == pytest.approx([2 / 3] * 3)


def test_so_are_they_where_each_took_a_batch_of_its_own() -> None:
    assert discarded(clear=True, divide=False, batches=3) == pytest.approx([2 / 3] * 3)


def test_passes_of_another_purpose_and_gradients_that_add_up_are_not() -> None:
    assert discarded(clear=True, divide=False, batches=1) == [0, 0, 0]
    assert discarded(clear=False, divide=True) == [0, 0, 0]


# --- an optimizer for each update ------------------------------------------------------------------------------------


def rebuilt(build: Callable[[nn.Module], torch.optim.Optimizer], *, every: int) -> list[float]:
    watched = Watched([RebuiltOptimizerProbe()])
    model = nn.Linear(4, 2)
    for step in range(1, 13):
        if (step - 1) % every == 0:
            optimizer = build(model)
        model(torch.randn(8, 4)).square().mean().backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
        optimizer.step()
    return watched.values("optimizer.rebuilt")


def test_optimizers_of_one_update_each_are_counted_if_they_have_a_memory_to_lose() -> None:
    assert rebuilt(lambda m: torch.optim.Adam(m.parameters()), every=1)[-1] == 11
    assert rebuilt(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), every=1)[-1] == 11
    assert max(rebuilt(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), every=1)) == 0


def test_optimizers_of_several_updates_or_of_copies_are_not() -> None:
    assert max(rebuilt(lambda m: torch.optim.Adam(m.parameters()), every=4)) <= 1
    copies = [nn.Linear(4, 2) for _ in range(12)]
    assert max(rebuilt(lambda _: torch.optim.Adam(copies.pop().parameters()), every=1)) == 0


# --- a schedule that gets nowhere ------------------------------------------------------------------------------------

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def reached(schedule: Schedule | None, *, every: int = 1, steps: int = 120, planned: int | None = None) -> float:
    watched = Watched([ScheduleReachProbe()], Everything())
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = schedule(optimizer) if schedule else None
    watched.emit(EventKind.TRAIN_START, 0, max_steps=planned)
    for step in range(1, steps + 1):
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
        optimizer.step()
        if driver is not None and step % every == 0:
            driver.step()
    return watched.last("lr.reached")


def cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=300)


def warm_up(steps: int) -> Schedule:
    return lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / steps))


def test_a_cycle_that_is_stepped_per_epoch_is_told() -> None:
    assert reached(cycle, every=15) < 0.1


def test_a_warm_up_that_the_planned_steps_do_not_suffice_for_is_told_from_half_of_them_on() -> None:
    assert reached(warm_up(20_000), planned=120) == pytest.approx(120 / 20_000)
    assert reached(warm_up(20_000), planned=120, steps=55) == 1


def test_a_factor_that_is_a_rate_and_falls_is_told() -> None:
    fading = reached(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1e-3 * 0.99**step))
    assert fading == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "schedule",
    [cycle, warm_up(40), warm_up(20_000), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 120), None],
    ids=["a cycle per update", "a short warm-up", "a long one of a run without an end", "a fading rate", "none"],
)
def test_schedules_that_get_there_or_may_yet_are_not(schedule: Schedule | None) -> None:
    assert reached(schedule) == 1


def test_a_run_that_goes_on_from_a_checkpoint_is_not_judged() -> None:
    watched = Watched([ScheduleReachProbe()])
    optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    driver = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-3 * 0.9**step)
    for step in range(500, 600):
        watched.emit(EventKind.BEFORE_UPDATE, step, optimizer=optimizer)
        optimizer.step()
        driver.step()
    assert watched.values("lr.reached") == [1.0] * len(watched.values("lr.reached"))
