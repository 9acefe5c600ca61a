"""Data of an evaluation that are not what the training has seen: other numbers of classes, other targets, rows that change."""

from __future__ import annotations

import pytest
import torch
from driver import Watched

from healthcheck.core.events import EventKind
from healthcheck.probes.evaluation_data import AugmentedEvaluationProbe, EvaluationScaleProbe, RenumberedClassProbe

TABLES = {
    "in another order": ([[1, 18, 1], [0, 1, 19], [20, 0, 0]], 0.9),
    "one further": ([[0, 20, 0, 0], [0, 0, 20, 0], [0, 0, 0, 20], [20, 0, 0, 0]], 1.0),
    "two classes swapped": ([[3, 17], [19, 1]], 0.8),
    "right": ([[18, 1, 1], [0, 20, 0], [1, 0, 19]], 0.0),
    "two labels answered by one class": ([[0, 20, 0], [0, 20, 0], [1, 18, 1]], 0.0),
    "a class that hardly comes": ([[20, 0, 0], [0, 20, 0], [2, 0, 0]], 0.0),
    "one class alone": ([[0, 20], [0, 0]], 0.0),
}


@pytest.mark.parametrize("case", TABLES)
def test_answers_that_would_be_right_under_other_numbers_are_counted(case: str) -> None:
    table, part = TABLES[case]
    watched = Watched([RenumberedClassProbe()])
    watched.emit(EventKind.EVAL_END, 1, label_counts=torch.tensor(table, dtype=torch.float), phase="eval")
    assert watched.last("eval.renumbered") == pytest.approx(part, abs=0.06)


def apart(trained: torch.Tensor, evaluated: torch.Tensor) -> float:
    watched = Watched([EvaluationScaleProbe()])
    x = torch.randn(len(trained), 8)
    watched.emit(EventKind.LOSS, 1, batch=(x, trained), phase="train")
    watched.emit(EventKind.EVAL_STEP, 1, batch=(x, evaluated), phase="eval")
    return watched.last("eval.targets_apart")


def test_targets_on_another_scale_are_far_apart() -> None:
    torch.manual_seed(0)
    y = torch.randn(64)
    assert apart(y, 250 + 40 * y) > 30
    assert apart(250 + 40 * y, y) > 5
    assert apart(y, 0.01 * y) > 50
    assert apart(y, torch.randn(64) + 1) < 3


def changed(*batches: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    watched = Watched([AugmentedEvaluationProbe()])
    for step, batch in enumerate(batches, start=1):
        for _ in range(2):  # the second batch of an evaluation is not looked at
            watched.emit(EventKind.EVAL_STEP, step, batch=batch, phase="eval")
    return watched.values("eval.inputs_changed")


def test_the_same_labels_with_other_inputs_each_time_are_counted() -> None:
    x, y = torch.randn(32, 6), torch.arange(32) % 5
    y = y[torch.randperm(32)]
    assert changed((x, y), (x + 0.1, y), (x - 0.1, y)) == [0, 1, 2]
    assert changed((x, y), (x, y), (x, y)) == [0, 0, 0]
    other = y[torch.randperm(32)]
    assert changed((x, y), (x + 0.1, other), (x - 0.1, y)) == [0, 0, 0]
