"""Scripts that nobody has changed: whether an update is made is decided where loss and gradients are, in the launch that
measures them, and the run is bit for bit the one without the bad step."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from healthcheck.assembly import open_session
from healthcheck.instrument import gate
from healthcheck.instrument.script import ScriptTrainer

STEPS, BAD = 40, (9, 23)
SCRIPT = """
import math, os
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
data = torch.randn({steps}, 4, 6, device="cuda")
spoiled = {spoiled!r}
with torch.autocast("cuda", torch.bfloat16, enabled={half}):
    for step in range(1, {steps} + 1):
        bad = step in {bad}
        if bad and spoiled == "skipped":
            continue
        optimizer.zero_grad()
        loss = model(data[step - 1]).pow(2).mean()
        if {half}:
            loss = loss.bfloat16()
        if bad and spoiled == "loss":
            loss = loss + math.nan  # its gradient is as ever
        if bad and spoiled == "large loss":
            loss = loss + 1000.0
        loss.backward()
        if bad and spoiled == "gradient":
            model[2].bias.grad.index_fill_(0, torch.ones(1, dtype=torch.int64, device="cuda"), math.inf)
        if {clipped} and not (bad and spoiled == "gradient"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
state = [p.detach().clone() for p in model.parameters()]
state += [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
torch.save(state, {target!r})
"""
RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "bad-loss": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "large-loss": {"metric": "loss", "when": {"above": 100}, "severity": "error", "then": ["skip_update"]},
        "bad-gradient": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "each": {"metric": "updates.skipped", "when": {"above": 100}},
    },
}


def trained(folder: Path, name: str, session: Any = None, **how: Any) -> list[torch.Tensor]:
    script, target = folder / f"{name}.py", str(folder / f"{name}.pt")
    script.write_text(SCRIPT.format(steps=STEPS, bad=BAD, target=target, **how), encoding="utf-8")
    if session is None:
        runpy.run_path(str(script), run_name="__main__")
    else:
        ScriptTrainer(session).run(str(script), [])
    state: list[torch.Tensor] = torch.load(target)
    return state


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("spoiled", ["loss", "large loss", "gradient", "nothing"])
def test_a_bad_step_is_held_back_without_another_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str, half: bool, clipped: bool
) -> None:
    how = {"half": half, "clipped": clipped}
    wanted = trained(tmp_path, "plain", spoiled="skipped" if spoiled != "nothing" else "nothing", **how)
    asked: list[int] = []
    flag = gate.device_flag
    monkeypatch.setattr(gate, "device_flag", lambda terms: (asked.append(1), flag(terms))[1])
    session = open_session(target="train.py", rules=RULES, console=False, record=False)
    found = trained(tmp_path, "watched", session, spoiled=spoiled, **how)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(asked) <= 3, "the launch that measures the gradients knows the answer"
    held = [step for step, value in session.history("updates.skipped", 100) if value]
    assert held == (list(BAD) if spoiled != "nothing" else [])
    losses = dict(session.history("loss", 100))
    assert set(losses) == set(range(1, STEPS + 1))
    assert [step for step, value in losses.items() if math.isnan(value)] == (list(BAD) if spoiled == "loss" else [])
    rule = {"loss": "bad-loss", "large loss": "large-loss", "gradient": "bad-gradient"}.get(spoiled)
    assert {alert.rule for alert in session.alerts} == ({rule} if rule else set())
