"""Gating on a device: bit for bit the run without the bad step, and no wait where the optimizer is fused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

RULES = {
    "version": 1,
    "rules": {
        "bad-gradient": {
            "metric": "grad_norm", "when": "nonfinite", "only_if": {"amp.skipped": 0}, "severity": "error",
            "then": ["skip_update"],
        },
        "counted": {"metric": "updates.skipped_streak", "when": {"at_least": 100}},
        "each": {"metric": "updates.skipped", "when": {"above": 100}},
        "scaler": {"metric": "amp.skipped", "when": {"above": 100}},
    },
}  # fmt: skip

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}
PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
STEPS = 8


def build() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).cuda(), torch.randn(STEPS, 4, 6, device="cuda")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        for key in sorted(optimizer.state.get(p, {})):
            value = optimizer.state[p][key]
            if isinstance(value, torch.Tensor):
                state.append(value.detach().clone())
    return state


def one(model: nn.Module, optimizer: Any, x: torch.Tensor, *, bad: bool, scaler: Any = None) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if bad:
        model[2].bias.grad.index_fill_(0, torch.ones(1, dtype=torch.int64, device="cuda"), math.nan)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss


def compare(make: Callable[[Any], Any], bad: set[int], watch: Any, guard: Callable[[int], None], **options: Any) -> Any:
    model, data = build()
    optimizer = make(model.parameters())
    for step in range(1, STEPS + 1):
        if step not in bad:
            one(model, optimizer, data[step - 1], bad=False)
    wanted = state_of(model, optimizer)
    model, data = build()
    optimizer = make(model.parameters())
    health = watch(model, optimizer, rules=RULES, **options)
    for step in range(1, STEPS + 1):
        guard(step)
        health.step(loss=one(model, optimizer, data[step - 1], bad=step in bad))
    torch.cuda.set_sync_debug_mode("default")
    found = state_of(model, optimizer)
    health.close()
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not hasattr(optimizer, "found_inf")
    assert [step for step, value in health.history("updates.skipped") if value] == sorted(bad)
    alert = health.alerts[0]
    assert alert.fired_step == min(bad)
    assert alert.facts["first"] == "2.bias, 1 of 2 values"
    return health


@pytest.mark.parametrize("bad", [{1}, {4}, {1, 2, 5}])
@pytest.mark.parametrize("name", list(FUSED))
def test_fused_optimizers_skip_exactly_and_without_a_wait(watch: Any, name: str, bad: set[int]) -> None:
    complete = next(step for step in range(1, STEPS) if step not in bad)
    guard = lambda step: torch.cuda.set_sync_debug_mode("error" if step > complete else "default")  # noqa: E731
    health = compare(FUSED[name], bad, watch, guard)
    assert health.alerts[0].actions[0].done


@pytest.mark.parametrize("bad", [{1}, {4}, {1, 2, 5}])
@pytest.mark.parametrize("name", list(PLAIN))
def test_others_skip_exactly_with_the_opt_in_wait(watch: Any, name: str, bad: set[int]) -> None:
    compare(PLAIN[name], bad, watch, lambda step: None, settings={"gate": "sync"})


def test_without_it_the_capability_says_that_it_cannot(watch: Any) -> None:
    model, data = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    health = watch(model, optimizer, rules=RULES)
    said: list[str] = []
    health.session.note = said.append
    for step in range(1, STEPS + 1):
        health.step(loss=one(model, optimizer, data[step - 1], bad=step == 4))
    health.close()
    assert len(said) == 1
    assert said[0].startswith("cannot gate (bad-gradient act")
    assert "skip_update" not in health.report["capabilities"]["controls"]
    assert "fused=True" in health.report["capabilities"]["gaps"]["skip_update"]
    (alert,) = health.alerts
    assert not alert.actions[0].done


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", list(FUSED))
def test_a_healthy_scaler_that_skips_is_no_alert_and_its_step_is_its_own(watch: Any, name: str, fused: bool) -> None:
    make = (FUSED if fused else PLAIN)[name]
    results = []
    for watched in (False, True):
        model, data = build()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        health = (
            watch(model, optimizer, rules=[RULES, "healthcheck:recommended"], off=["recompilation.graph-breaks"])
            if watched
            else None
        )
        for step in range(1, STEPS + 1):
            loss = one(model, optimizer, data[step - 1], bad=step in (3, 6), scaler=scaler)
            if health is not None:
                health.step(loss=loss)
        results.append(state_of(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert health is not None
    health.close()
    assert [a.rule for a in health.alerts] == []
    if fused:
        assert [step for step, value in health.history("amp.skipped") if value] == [3, 6]
        grads = dict(health.history("grad_norm"))
        assert set(grads) == set(range(1, STEPS + 1))
        assert max(v for s, v in grads.items() if s not in (3, 6)) < 10, "the loss scale was not taken out"
    else:
        assert [step for step, value in health.history("amp.skipped") if value] == [3, 6]


def test_a_real_fault_under_a_scaler_is_still_found(watch: Any) -> None:
    """NaN in every step: the scaler skips them all, and the streak tells."""
    model, data = build()
    optimizer = FUSED["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    rules = {"version": 1, "rules": {"streak": {"metric": "amp.skipped_streak", "when": {"at_least": 5}}}}
    health = watch(model, optimizer, rules=rules)
    for _ in range(7):
        health.step(loss=one(model, optimizer, data[0], bad=True, scaler=scaler))
    health.close()
    assert [(a.rule, a.fired_step) for a in health.alerts] == [("streak", 5)]


def test_a_parameter_that_joins_later_is_not_gated_before_it_has_state(watch: Any) -> None:
    model, data = build()
    model[2].bias.requires_grad_(False)
    optimizer = FUSED["adamw"](model.parameters())
    health = watch(model, optimizer, rules=RULES)
    for step in range(1, STEPS + 1):
        if step == 4:
            model[2].bias.requires_grad_(True)
        health.step(loss=one(model, optimizer, data[step - 1], bad=step == 4))
    health.close()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert bool(optimizer.state[model[2].bias]["exp_avg"].isfinite().all())
