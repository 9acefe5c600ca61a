"""A torch whose compiler has other insides: watching goes on without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.instrument import compiled


def test_without_the_compilers_insides_updates_are_seen_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_frame_switch", lambda: None)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {"grad": {"metric": "grad_norm", "when": {"above": 1e9}}}
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
        assert len(health.history("grad_norm")) == 3
        assert health.session is not None
        assert health.session.internal_errors == []
