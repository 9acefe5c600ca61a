"""Saturated and outlying layer outputs, and evaluations that change the model."""

from __future__ import annotations

import torch
from driver import Everything, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.activations import ActivationProbe
from healthcheck.probes.modes import EvaluationModeProbe


def look(model: nn.Module, x: torch.Tensor, *, every: int = 1, steps: int = 3) -> Watched:
    watched = Watched([ActivationProbe()], Everything(every=every))
    watched.emit(EventKind.TRAIN_START, 1, model=View(model))
    for step in range(steps):
        model(x)
        watched.emit(EventKind.STEP_END, step, model=View(model))
    return watched


def test_the_worst_squashing_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())
    watched = look(model, torch.randn(16, 4) * 1000)
    assert watched.last("activations.saturated") > 0.9
    assert watched.facts("activations.saturated")["which"].startswith("1,")
    assert look(model, torch.randn(16, 4)).last("activations.saturated") < 0.1


def test_outliers_show_in_the_largest_value_and_the_kurtosis() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[1].bias[0] = 1e5
    watched = look(model, torch.randn(64, 4))
    assert watched.last("activations.max") > 9e4
    assert watched.last("activations.kurtosis") > 50


def test_only_training_passes_of_steps_that_are_due_are_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    watched = look(model, torch.randn(16, 4), every=2, steps=6)
    assert [step for step, _ in watched.of("activations.max")] == [2, 4]
    assert look(model.eval(), torch.randn(16, 4)).samples == []


def test_hooks_are_removed_at_the_end() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    watched = look(model, torch.randn(16, 4))
    watched.close()
    assert not any(m._forward_hooks for m in model.modules())


def evaluate(model: nn.Module, run: nn.Module, batches: int = 3) -> list[float]:
    watched = Watched([EvaluationModeProbe()])
    watched.emit(EventKind.EVAL_START, 1, model=View(model))
    for _ in range(batches):
        watched.emit(EventKind.EVAL_STEP, 1, model=View(model))
        with torch.no_grad():
            run(torch.randn(8, 4))
    run(torch.randn(8, 4))  # training goes on before anybody notices that the evaluation is over
    watched.emit(EventKind.EVAL_END, 1, model=View(model))
    return watched.values("modules.train_in_eval")


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))


def test_statistics_that_move_during_an_evaluation_are_counted() -> None:
    model = normalised()
    assert evaluate(model, model) == [1.0]


def test_an_evaluation_in_eval_mode_and_one_of_a_copy_are_not() -> None:
    model = normalised()
    assert evaluate(model, model.eval()) == [0.0]
    model.train()
    assert evaluate(model, normalised()) == [0.0]


def test_statistics_that_are_renewed_without_momentum_are_not() -> None:
    model = normalised()
    model[1].momentum = None
    assert evaluate(model, model) == []
