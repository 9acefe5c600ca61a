"""A bad update does not reach the weights: bit for bit the run without that step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.core.protocols import FINITE, Bound
from healthcheck.core.samples import Sample
from healthcheck.instrument.gate import Limit, device_flag
from healthcheck.instrument.script import ScriptTrainer

RULES = {
    "version": 1,
    "rules": {
        "bad-gradient": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "counted": {"metric": "updates.skipped_streak", "when": {"at_least": 100}},
        "each": {"metric": "updates.skipped", "when": {"above": 100}},
    },
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "momentum-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}
STEPS = 6


def build() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(STEPS, 4, 6)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        for key in sorted(optimizer.state.get(p, {})):
            value = optimizer.state[p][key]
            if isinstance(value, torch.Tensor):
                state.append(value.detach().clone())
    return state


def one(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, *, bad: bool) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    if bad:
        model[2].bias.grad[1] = math.nan
    optimizer.step()
    return loss


@pytest.mark.parametrize("bad", [{1}, {4}, {3, 4, 5}])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_weights_and_state_are_those_of_a_run_without_the_bad_steps(name: str, bad: set[int]) -> None:
    model, data = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(1, STEPS + 1):
        if step not in bad:
            one(model, optimizer, data[step - 1], bad=False)
    wanted = state_of(model, optimizer)

    model, data = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    with healthcheck.watch(model, optimizer, rules=RULES, console=False, record=False) as health:
        for step in range(1, STEPS + 1):
            health.step(loss=one(model, optimizer, data[step - 1], bad=step in bad))
    found = state_of(model, optimizer)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    (alert,) = health.alerts
    assert alert.fired_step == min(bad)
    assert alert.facts["first"].startswith("2.bias")
    assert [step for step, value in health.history("updates.skipped") if value] == sorted(bad)
    assert max(value for _, value in health.history("updates.skipped_streak")) == len(bad)
    assert not hasattr(optimizer, "found_inf")


def test_a_constant_bound_and_one_from_older_samples_gate_too() -> None:
    rules = {
        "version": 1,
        "rules": {
            "large": {"metric": "grad_norm", "when": {"above": 1000}, "then": ["skip_update"]},
            "jump": {
                "metric": "grad_norm",
                "when": {"ratio": {"above": 50}},
                "min_samples": 4,
                "then": ["skip_update"],
            },
        },
    }
    model, data = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        for step in range(1, 13):
            before = state_of(model, optimizer)
            factor = {5: 1e6, 10: 100.0}.get(step, 1.0)
            optimizer.zero_grad()
            loss = model(data[0]).pow(2).mean() * factor
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
            kept = all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))
            assert kept == (step in (5, 10)), step
    assert {(a.rule, a.fired_step) for a in health.alerts} == {("large", 5), ("jump", 5), ("jump", 10)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("excused", [False, True])
@pytest.mark.parametrize(
    "bound",
    [
        Bound(FINITE.low, 5.0),
        Bound(FINITE.low, math.nextafter(5.0, 0)),
        Bound(0.1, FINITE.high),
        Bound(-1.0, 1.0),
        FINITE,
    ],
)
def test_a_limit_is_compared_as_tensor_as_it_is_on_the_host(dtype: torch.dtype, excused: bool, bound: Bound) -> None:
    """A float32 loss of 0.1 is greater than the limit 0.1 of a rule; rounded to float32 it would not be."""
    limit = Limit("rule", bound, excused)
    for number in (0.0, 0.1, 1.0, -1.0, 5.0, 6e4, math.nan, math.inf, -math.inf):
        value = torch.tensor([number], dtype=dtype)
        flag = device_flag([(Sample("loss", 1, value), limit)])
        assert bool(flag) == limit.breached(float(value.double())), number


def test_a_value_that_is_no_number_holds_back_the_update_of_any_rule_that_gates() -> None:
    """Unless another rule owns it: that one says what is done about it."""
    rules: dict[str, Any] = {"large": {"metric": "grad_norm", "when": {"above": 1e6}, "then": ["skip_update"]}}
    for owner, held in (({}, [3]), ({"owner": {"metric": "grad_norm", "when": "nonfinite", "then": ["warn"]}}, [])):
        each = {"each": {"metric": "updates.skipped", "when": {"above": 100}}}
        model, data = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = {"version": 1, "rules": {**rules, **owner, **each}}
        with healthcheck.watch(model, optimizer, rules=watched, console=False, record=False) as health:
            for step in range(1, STEPS + 1):
                health.step(loss=one(model, optimizer, data[step - 1], bad=step == 3))
        skipped = [step for step, value in health.history("updates.skipped") if value]
        assert skipped[: len(held)] == held
        assert bool(skipped) == bool(held)


@pytest.mark.parametrize(
    "change",
    [{"mode": "observe"}, {"then": ["warn"]}, {"for": 2}, {"phase": "eval"}, {"warmup": 10}],
    ids=lambda change: next(iter(change)),
)
def test_a_rule_that_does_not_act_on_this_update_does_not_hold_it_back(change: dict[str, Any]) -> None:
    rule = {"metric": "grad_norm", "when": {"above": 1e-9}, "then": ["skip_update"], **change}
    model, data = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model, optimizer)
    rules = {"version": 1, "rules": {"any": rule}}
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        health.step(loss=one(model, optimizer, data[0], bad=False))
    assert not all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


def test_the_setting_off_lets_every_update_through() -> None:
    model, data = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {**RULES, "settings": {"gate": "off"}}
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        for step in (1, 2):
            health.step(loss=one(model, optimizer, data[0], bad=step == 2))
    assert health.history("updates.skipped") == []


def test_a_scaler_with_a_fused_optimizer_on_the_host_is_no_false_alarm() -> None:
    model, data = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with healthcheck.watch(model, optimizer, rules="healthcheck:recommended", console=False, record=False) as health:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss = model(data[step - 1]).pow(2).mean()
            scaler.scale(loss).backward()
            if step == 3:
                model[2].bias.grad[1] = math.inf
            scaler.step(optimizer)
            scaler.update()
            health.step(loss=loss)
    assert [a.rule for a in health.alerts] == []


class Raised(torch.autograd.Function):
    """Adds to the loss what no gradient shows."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return loss + by

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


LOSS_RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "bad-loss": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "large-loss": {"metric": "loss", "when": {"above": 100}, "severity": "error", "then": ["skip_update"]},
        "each": {"metric": "updates.skipped", "when": {"above": 100}},
    },
}


def losses_raised(optimizer_name: str, bad: set[int], by: float, *, watched: bool, told: bool, **how: Any) -> Any:
    """Two micro-batches a step; the loss of some steps is raised, their gradients are as ever."""
    model, data = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how.get("scaled", False))
    rules = how.get("rules", LOSS_RULES)
    health = healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) if watched else None
    for step in range(1, STEPS + 1):
        if health is None and step in bad:
            continue
        optimizer.zero_grad()
        losses = [model(part).pow(2).mean() for part in data[step - 1].chunk(2)]
        if step in bad:
            losses[1] = Raised.apply(losses[1], torch.tensor(by))
        for loss in losses:
            scaler.scale(loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        if health is not None:
            health.step(loss=sum(losses) / 2 if told else None)
            if health.should_stop:
                break
    if health is not None:
        health.close()
    return state_of(model, optimizer), health


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("name", "bad", "by", "scaled"),
    [("adamw", {1}, math.nan, False), ("adamw-fused", {4}, math.inf, True), ("momentum", {3, 4}, 1000.0, False)],
)
def test_a_loop_that_tells_its_loss_afterwards_is_held_back_by_it_all_the_same(
    name: str, bad: set[int], by: float, scaled: bool, told: bool
) -> None:
    wanted, _ = losses_raised(name, bad, by, watched=False, told=told, scaled=scaled)
    found, health = losses_raised(name, bad, by, watched=True, told=told, scaled=scaled)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    (alert,) = health.alerts
    assert alert.fired_step == min(bad)
    assert alert.actions[0].done
    assert alert.actions[0].text == f"held back the update of step {min(bad)}"
    assert [step for step, value in health.history("updates.skipped") if value] == sorted(bad)
    assert len(health.history("loss")) == STEPS


def test_a_stop_on_the_loss_leaves_the_weights_of_the_step_before() -> None:
    rules = {"version": 1, "rules": {"loss": {"metric": "loss", "when": "nonfinite", "then": ["stop"]}}}
    wanted, _ = losses_raised("adamw", {4, 5, 6}, math.inf, watched=False, told=True)
    found, health = losses_raised("adamw", {4}, math.inf, watched=True, told=True, rules=rules)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert health.report["stop"]["step"] == 4


def test_the_loss_of_another_model_holds_nothing_back() -> None:
    model, data = build()
    other = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with healthcheck.watch(model, optimizer, rules=LOSS_RULES, console=False, record=False) as health:
        for step in (1, 2):
            (other(data[0]).mean() * math.inf).backward()
            health.step(loss=one(model, optimizer, data[step], bad=False))
    assert [value for _, value in health.history("updates.skipped")] == [0.0, 0.0]


def test_without_a_rule_that_gates_on_the_loss_backward_is_left_alone() -> None:
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.autograd.backward
    with healthcheck.watch(model, optimizer, rules=RULES, console=False, record=False):
        assert torch.autograd.backward is before


def test_of_two_optimizers_the_one_with_the_bad_gradient_is_held_back_and_counted() -> None:
    def build_pair() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer], torch.Tensor]:
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 3), nn.Linear(3, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (judge, maker)]
        return maker, judge, optimizers, torch.randn(STEPS, 5, 4)

    def play(bad: int, health: Any, parts: Any) -> None:
        maker, judge, (judges, makes), data = parts
        for step in range(1, STEPS + 1):
            judges.zero_grad()
            lost = judge(maker(data[step - 1]).detach()).pow(2).mean()
            lost.backward()
            if step == bad:
                judge.bias.grad[0] = math.nan
            if health is not None or step != bad:
                judges.step()
            makes.zero_grad()
            (1 - judge(maker(data[step - 1]))).pow(2).mean().backward()
            makes.step()
            if health is not None:
                health.step(loss=lost)

    plain = build_pair()
    play(3, None, plain)
    watched = build_pair()
    with healthcheck.watch([*watched[:2]], watched[2], rules=RULES, console=False, record=False) as health:
        play(3, health, watched)
    for mine, wanted in zip(watched[:2], plain[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), wanted.parameters(), strict=True))
    assert [step for step, value in health.history("updates.skipped") if value] == [3]
    assert [value for _, value in health.history("updates.skipped[optimizer=1]")] == [0.0] * STEPS


def test_an_update_of_a_script_that_was_held_back_is_counted_once(tmp_path: Path) -> None:
    """Its step is shown by an event besides its row, because something has happened in it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import math, torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)\n"
        "for step in range(1, 41):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 3)).sum().backward()\n"
        "    if step in (9, 23):\n"
        "        model.bias.grad.fill_(math.nan)\n"
        "    optimizer.step()\n",
        encoding="utf-8",
    )
    session = open_session(target="train.py", rules=RULES, console=False, record=False)
    ScriptTrainer(session).run(str(script), [])
    assert [step for step, value in session.history("updates.skipped", 100) if value] == [9, 23]
    assert max(value for _, value in session.history("updates.skipped_streak", 100)) == 1
