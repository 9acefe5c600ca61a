"""``locate`` where values arrive late: the calls of the last steps are kept, and keeping them waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

RULES = {
    "version": 1,
    "rules": {
        "bad": {
            "metric": "grad_norm",
            "when": "nonfinite",
            "severity": "error",
            "then": ["warn", "locate", "skip_update"],
        }
    },
}


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def train(watch: Callable[..., Any], bad_step: int, steps: int, *, guarded: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Log(), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    health = watch(model, optimizer, rules=RULES)
    batches = [torch.rand(32, 64, device="cuda") + 0.1 for _ in range(steps)]
    if bad_step:
        batches[bad_step - 1][0, 0] = 0.0
    for step, batch in enumerate(batches, 1):
        if guarded and step > 1:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    torch.cuda.set_sync_debug_mode("default")
    health.close()
    return health


def test_a_step_whose_values_come_late_is_still_replayed(watch: Callable[..., Any]) -> None:
    health = train(watch, bad_step=4, steps=10)
    (alert,) = health.alerts
    assert alert.fired_step == 4
    (outcome,) = (o for o in alert.actions if o.action == "locate")
    assert outcome.done, outcome.text
    assert outcome.text.startswith("first non-finite output: `0` (Log), 1 of 2,048 values infinite in float32")


def test_listening_passes_where_a_wait_is_an_error(watch: Callable[..., Any]) -> None:
    health = train(watch, bad_step=0, steps=10, guarded=True)
    assert not health.alerts
    assert [step for step, _ in health.history("grad_norm")] == list(range(1, 11))


def test_random_numbers_of_the_card_go_on_as_without_a_replay(watch: Callable[..., Any]) -> None:
    drawn = []
    for bad_step in (4, 0):
        train(watch, bad_step=bad_step, steps=10)
        drawn.append(torch.rand(4, device="cuda"))
    assert torch.equal(drawn[0], drawn[1])
