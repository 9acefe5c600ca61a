"""Device time of our own work is measured without a wait, and stands in the report."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from healthcheck.device.device_time import EVERY

RULES = {"version": 1, "rules": {"grads": {"metric": "grad_norm", "when": "nonfinite"}}}


def test_the_report_tells_what_the_device_spent_on_us(watch: Any) -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    health = watch(model, optimizer, rules=RULES)
    x = torch.randn(64, 4096, device="cuda")
    for step in range(2 * EVERY + 2):
        torch.cuda.set_sync_debug_mode("error" if step > 5 else "default")
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    torch.cuda.set_sync_debug_mode("default")
    health.close()
    overhead = health.report["overhead"]
    read = 4 * 4096 * 4096 / 8e12  # nothing reads the gradients faster than this
    assert read < overhead["device_seconds_per_step"] < 0.05
