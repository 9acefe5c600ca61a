"""On a device one launch sums up what an update did; the numbers are those that the host would have found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

RULES = {
    "version": 1,
    "rules": {
        "ratio": {"metric": "update_ratio", "when": {"above": 1000}},
        "each": {"metric": "update_ratio[*]", "when": {"above": 1000}},
        "lost": {"metric": "updates.lost", "when": {"above": 1000}},
        "unmoved": {"metric": "params.unmoved", "when": {"above": 0}},
    },
}


def history(watch: Any, device: str, dtype: torch.dtype, lr: float) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(dtype)
    stuck = nn.Parameter(torch.zeros(8))  # never gets a gradient
    model.register_parameter("stuck", stuck)
    model = model.to(device)
    x = torch.randn(32, 16).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
    health = watch(model, optimizer, rules=RULES)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    health.close()
    names = ["update_ratio", "updates.lost", "params.unmoved", *(f"update_ratio[{n}.weight]" for n in "02")]
    return {name: [v for _, v in health.history(name)] for name in names}


@pytest.mark.parametrize(("dtype", "lr"), [(torch.float32, 0.05), (torch.bfloat16, 0.05), (torch.bfloat16, 1e-4)])
def test_movement_on_a_device_is_that_on_the_host(watch: Any, dtype: torch.dtype, lr: float) -> None:
    host, device = history(watch, "cpu", dtype, lr), history(watch, "cuda", dtype, lr)
    assert host["update_ratio"]
    assert bool(host["updates.lost"]) == (dtype is torch.bfloat16)
    tolerance = 1e-3 if dtype is torch.float32 else 0.3
    for name in ("update_ratio", "updates.lost", "update_ratio[0.weight]", "update_ratio[2.weight]"):
        assert device[name] == pytest.approx(host[name], rel=tolerance, abs=1e-2 * tolerance), name
    assert device["params.unmoved"] == host["params.unmoved"]
    assert max(device["params.unmoved"]) >= 1
