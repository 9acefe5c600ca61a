"""One optimizer per parameter, stepping while gradients are still being made: a pass is a step, seen as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.instrument.script import InProcess
from healthcheck.run.ending import Ending

RULES = {
    "version": 1,
    "rules": {
        "bad": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "count": {"metric": "grad_nonfinite", "when": {"above": 0}},
        "each": {"metric": "grad_norm[parameter=*]", "when": {"above": 1e9}},
        "ratio": {"metric": "grad.layer_ratio", "when": {"above": 1e9}},
        "moved": {"metric": "update_ratio", "when": {"above": 1e9}},
        "loss": {"metric": "loss", "when": {"above": 1e9}},
    },
}
STEPS = 4


def by_hook(model: nn.Module, before: Callable[[Any], None]) -> tuple[list[Any], list[Any]]:
    optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

    def step(parameter: Any) -> None:
        before(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return list(optimizers.values()), [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]


def by_torch(model: nn.Module, before: Callable[[Any], None]) -> tuple[list[Any], list[Any]]:
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    return _get_in_backward_optimizers(model), []


def train(how: str, make: Any, bad_at: int = 0) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(STEPS, 4, 6)
    session = open_session(rules=RULES, target="x", console=False, record=False) if how == "script" else None
    step = 0

    def spoil(parameter: Any) -> None:
        if step == bad_at and parameter is model[2].bias:
            parameter.grad[1] = math.nan

    health = None
    with nullcontext() if session is None else InProcess(session):
        optimizers, handles = make(model, spoil)
        if how == "watch":
            health = healthcheck.watch(model, optimizers, rules=RULES, console=False, record=False)
            session = health.session
        for step in range(1, STEPS + 1):
            loss = model(data[step - 1]).pow(2).mean()
            loss.backward()
            if health is not None:
                health.step(loss=loss)
    for handle in handles:  # a cycle through C++ that the garbage collector cannot free
        handle.remove()
    if health is not None:
        health.close()
    elif session is not None:
        session.finish(Ending())
    return [p.detach().clone() for p in model.parameters()], session


def plain_norms() -> list[dict[str, float]]:
    """Per-parameter gradient norms of the same training with one optimizer."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(STEPS, 4, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data[step]).pow(2).mean().backward()
        norms.append({name: float(p.grad.norm()) for name, p in model.named_parameters()})
        optimizer.step()
    return norms


@pytest.mark.parametrize("make", [by_hook, by_torch])
@pytest.mark.parametrize("how", ["watch", "script"])
def test_statistics_and_counts_are_those_of_one_optimizer(how: str, make: Any) -> None:
    plain, _ = train("plain", make)
    weights, session = train(how, make)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    assert session.internal_errors == []
    assert (session.step, session.unit) == (STEPS, "step")
    wanted = plain_norms()
    for name in wanted[0]:  # with other models alive in this process theirs and ours have a prefix
        (series,) = [
            key for key in session.history.series() if key.startswith("grad_norm[") and key.endswith(f"{name}]")
        ]
        found = [v for _, v in session.history(series)]
        assert found == pytest.approx([norms[name] for norms in wanted], rel=1e-4)
    total = [math.sqrt(sum(norm**2 for norm in norms.values())) for norms in wanted]
    assert [v for _, v in session.history("grad_norm")] == pytest.approx(total, rel=1e-4)
    assert [v for _, v in session.history("grad.layer_ratio")] == pytest.approx(
        [norms["0.weight"] / norms["2.weight"] for norms in wanted], rel=1e-4
    )
    assert [v for _, v in session.history("grad_nonfinite")] == [0.0] * STEPS
    assert len(session.history("loss")) == STEPS


@pytest.mark.parametrize("how", ["watch", "script"])
def test_a_bad_gradient_is_named_and_the_missing_gate_is_said(how: str) -> None:
    _, session = train(how, by_hook, bad_at=3)
    alerts = {alert.rule: alert for alert in session.alerts}
    assert alerts["bad"].fired_step == alerts["count"].fired_step == 3
    assert alerts["bad"].facts["first"].endswith("2.bias, 1 of 2 values")
    assert not alerts["bad"].actions[0].done
    report = session.report
    assert "skip_update" not in report["capabilities"]["controls"]
    assert report["capabilities"]["gaps"]["skip_update"].startswith("cannot gate: optimizers step inside the backward")
    assert report["rules"]["moved"]["reason"] == "optimizers step inside the backward pass, one by one"
