"""What the tests of ``locate`` share: a model with state and random numbers, a loop that watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import healthcheck

WHEN_BAD = {"metric": "grad_norm", "when": "nonfinite", "severity": "error"}


def rules(*then: Any) -> dict[str, Any]:
    return {"version": 1, "rules": {"bad": {**WHEN_BAD, "then": ["warn", *then]}}}


class Apply(nn.Module):
    """A function as a module with a name."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Net(nn.Module):
    """Batch norm and dropout, so that a replay has state to spoil and random numbers to repeat."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.middle, self.head = Apply(function), nn.Linear(8, 1)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        y: torch.Tensor = self.head(self.middle(self.drop(self.norm(self.fc(x)))))
        return y


def train(
    model: Any,
    *then: Any,
    steps: int = 3,
    data: Callable[[int], torch.Tensor] = lambda step: torch.randn(8, 4),
    loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.pow(2).mean(),
    forward: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A loop of one's own under watch; returns it closed."""
    torch.manual_seed(1)
    named = dict(model.named_modules()).get("_orig_mod", model)
    optimizer = torch.optim.SGD(named.parameters(), 0.01, momentum=0.9)
    health = healthcheck.watch(
        model, optimizer, rules=given or rules(*(then or ("locate",))), console=False, record=False, **options
    )
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(forward(model, data(step)))
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    health.close()
    assert not health.session.internal_errors
    return health


def told(health: Any) -> str:
    """What ``locate`` said of the first alert."""
    (outcome,) = (o for o in health.alerts[0].actions if o.action == "locate")
    return str(outcome.text)
