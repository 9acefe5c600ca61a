"""A model against somebody who only counts labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.predictions import SETTLED, FrequencyProbe

OFTEN = torch.tensor([0.6, 0.3, 0.1])
Answer = Callable[[torch.Tensor], torch.Tensor]


def told(answer: Answer, *, batches: int = 60, rows: int = 512, **options: object) -> list[float]:
    """Labels of these frequencies; the costs of ``answer``'s logits against the counter's, in each batch."""
    data = torch.Generator().manual_seed(0)
    watched = Watched([FrequencyProbe()])
    view = View(nn.Linear(1, 1))
    for step in range(1, batches + 1):
        labels = torch.multinomial(OFTEN, rows, replacement=True, generator=data)
        logits = answer(labels).requires_grad_()
        loss = nn.functional.cross_entropy(logits, labels, **options)
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach(), loss_graph=loss.grad_fn)
    return watched.values("loss.over_frequencies")


def by_frequency(labels: torch.Tensor) -> torch.Tensor:
    return OFTEN.log().repeat(len(labels), 1)


def all_alike(labels: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(labels), 3)


def with_a_hint(labels: torch.Tensor) -> torch.Tensor:
    return OFTEN.log() + nn.functional.one_hot(labels, 3)


def test_frequencies_cost_what_they_cost() -> None:
    values = told(by_frequency)
    assert len(values) == 60 - SETTLED
    assert values == pytest.approx([1.0] * len(values), abs=0.01)


def test_a_guess_among_all_classes_is_worse_and_a_hint_is_better() -> None:
    entropy = -(OFTEN * OFTEN.log()).sum().item()
    assert told(all_alike)[-1] == pytest.approx(torch.tensor(3.0).log().item() / entropy, rel=0.05)
    assert max(told(with_a_hint)) < 0.8


def test_label_smoothing_and_weights_do_not_enter() -> None:
    plain = told(by_frequency)
    assert told(by_frequency, label_smoothing=0.2) == pytest.approx(plain)
    assert told(by_frequency, weight=torch.tensor([0.1, 1.0, 5.0])) == pytest.approx(plain)


def test_labels_that_do_not_count_are_left_out() -> None:
    values = told(by_frequency, ignore_index=2)
    wanted = OFTEN[:2] / OFTEN[:2].sum()
    cost, counted = -(wanted * OFTEN[:2].log()).sum(), -(wanted * wanted.log()).sum()
    assert values[-1] == pytest.approx(float(cost / counted), rel=0.05)


def test_another_loss_says_nothing() -> None:
    watched = Watched([FrequencyProbe()])
    view = View(nn.Linear(1, 1))
    for step in range(1, 40):
        loss = nn.functional.mse_loss(torch.ones(64, requires_grad=True), torch.zeros(64))
        watched.emit(EventKind.LOSS, step, model=view, loss=loss.detach(), loss_graph=loss.grad_fn)
    assert watched.names() == set()
