"""A watched loop on a device never waits because of us, and copies once a step."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck.assembly import open_session
from healthcheck.instrument.script import ScriptTrainer

RULES = {
    "version": 1,
    "rules": {
        "loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error"},
        "grads-not-finite": {"metric": "grad_norm", "when": "nonfinite", "severity": "error"},
        "each-gradient": {"metric": "grad_norm[*]", "when": "nonfinite"},
        "bad-elements": {"metric": "grad_nonfinite", "when": {"above": 0}},
        "zero-gradients": {"metric": "grads.zero", "when": {"above": 1000}},
        "ratio": {"metric": "update_ratio", "when": {"above": 1000}, "every": 10},
        "unmoved": {"metric": "params.unmoved", "when": {"above": 1000}},
        "rate": {"metric": "lr", "when": {"equals": 123}},
        "spike": {"metric": "loss", "when": {"robust_z": {"above": 1000}}},
        "clip": {"metric": "clip.ratio", "when": {"below": 0}},
    },
}


def model_and_data() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 8))
    return model.cuda(), torch.randn(32, 64, device="cuda")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    health: Any,
    steps: int,
    *,
    clip: float | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> None:
    for step in range(1, steps + 1):
        before(step)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if health is not None:
            health.step(loss=loss)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd-momentum-fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_step_path_passes_where_a_wait_is_an_error(watch: Any, name: str, clip: float | None) -> None:
    model, x = model_and_data()
    optimizer = OPTIMIZERS[name](model.parameters())
    health = watch(model, optimizer, rules=RULES)
    guard = lambda step: torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # noqa: E731
    train(model, optimizer, x, health, 30, clip=clip, before=guard)
    torch.cuda.set_sync_debug_mode("default")
    health.close()
    for series in ("loss", "grad_norm", "grad_norm[0.weight]", "grad_nonfinite", "lr", "update_ratio"):
        assert health.history(series), series
    assert [step for step, _ in health.history("loss")] == list(range(1, 31))
    assert all(math.isfinite(value) for _, value in health.history("grad_norm"))


def test_values_are_those_of_a_plain_loop(watch: Any) -> None:
    wanted = []
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        wanted.append((float(loss.detach()), float(norm)))
    weights = [p.detach().clone() for p in model.parameters()]

    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    health = watch(model, optimizer, rules=RULES)
    train(model, optimizer, x, health, 10)
    health.close()
    assert [v for _, v in health.history("loss")] == [loss for loss, _ in wanted]
    assert [v for _, v in health.history("grad_norm")] == pytest.approx([norm for _, norm in wanted], rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_one_copy_to_the_host_a_step_and_no_synchronisation(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    health = watch(model, optimizer, rules=RULES)
    train(model, optimizer, x, health, 10)
    torch.cuda.synchronize()
    steps = 20
    with torch.profiler.profile(acc_events=True) as trace:
        train(model, optimizer, x, health, steps)
    events = trace.events() or []
    names = [e.name for e in events]
    copies = [n for n in names if "Memcpy DtoH" in n]
    waits = [n for n in names if "Synchronize" in n and "cudaDeviceSynchronize" not in n]
    assert len(copies) == steps, sorted(set(names))
    assert waits == []


USUAL = """
    import torch
    import training
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64, device="cuda")
    for step in range(60):
        with training.traced(step):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
"""


def test_a_usual_step_of_a_script_copies_nothing_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that measures gradients writes loss, norms and the norm that the loop has clipped by to the host itself."""
    names: list[str] = []

    @contextlib.contextmanager
    def traced(step: int) -> Iterator[None]:
        if step < 40:
            yield
            return
        torch.cuda.synchronize()
        with torch.profiler.profile(acc_events=True) as trace:
            yield
        names.extend(event.name for event in trace.events() or [])

    monkeypatch.setitem(sys.modules, "training", SimpleNamespace(traced=traced))
    rules = """
    version: 1
    rules:
      loss-not-finite: {metric: loss, when: nonfinite}
      gradients-high: {metric: grad_norm, when: {above: 1000}}
      each-gradient-high: {metric: "grad_norm[*]", when: {above: 1000}}
      rate-high: {metric: lr, when: {above: 1}}
    """
    session = open_session(
        target="train.py", rules=[rules], settings={"overhead_budget": "off"}, console=False, record=False
    )
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(USUAL))
    assert ScriptTrainer(session).run(str(script), []) == 0
    assert session.internal_errors == [] == session.dispatch.errors
    assert any("statistics" in name for name in names), "the kernel was launched"
    assert [name for name in names if "Memcpy DtoH" in name] == []
    for series in ("loss", "grad_norm", "grad_norm[0.weight]"):
        assert [step for step, _ in session.history(series, 100)] == list(range(1, 61))


def test_detail_is_of_the_step_that_was_bad_although_it_is_read_later(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    health = watch(model, optimizer, rules=RULES)

    def poison(step: int) -> None:
        for p in model.parameters():
            p._backward_hooks = None
        if step == 7:
            model[4].bias.register_hook(lambda g: g.index_fill(0, torch.tensor([3], device="cuda"), math.nan))
        torch.cuda._sleep(3_000_000)  # the host runs ahead: values come late

    train(model, optimizer, x, health, 12, before=poison)
    health.close()
    alert = next(a for a in health.alerts if a.rule == "grads-not-finite")
    assert alert.fired_step == 7
    assert alert.facts["first"] == "4.bias, 1 of 64 values"
    assert alert.facts["tensors"] == "1 of 10 gradients not finite"


@pytest.mark.parametrize("bad", [7, 8])
def test_a_bad_gradient_is_seen_at_most_two_steps_later(watch: Any, bad: int) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    health = watch(model, optimizer, rules=RULES)

    def poison(step: int) -> None:
        model[4].bias._backward_hooks = None
        if step == bad:
            model[4].bias.register_hook(lambda g: g.fill_(math.inf))
        torch.cuda.synchronize()  # the device is not behind

    train(model, optimizer, x, health, 14, before=poison)
    health.close()
    alert = next(a for a in health.alerts if a.rule == "grads-not-finite")
    assert alert.fired_step == bad
    assert alert.detected_step - bad <= 2


def test_a_stream_that_the_user_switched_gives_the_right_values(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    health = watch(model, optimizer, rules=RULES)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(model, optimizer, x, health, 8)
    torch.cuda.current_stream().wait_stream(side)
    train(model, optimizer, x, health, 8)
    health.close()
    first = [v for _, v in health.history("loss")]
    assert len(first) == 16
    assert all(a >= b for a, b in itertools.pairwise(first)), first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_model_over_two_devices_gives_the_right_norm(watch: Any) -> None:
    model = nn.ModuleList([nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 1).to("cuda:1")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    health = watch(model, optimizer, rules=RULES)
    x = torch.randn(4, 8, device="cuda:0")
    for _ in range(5):
        optimizer.zero_grad()
        loss = model[1](model[0](x).to("cuda:1")).pow(2).mean()
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    wanted = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx([wanted] * 5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scalars_of_any_type_arrive_as_they_are_and_in_one_copy(watch: Any, dtype: torch.dtype) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rules = {"version": 1, "rules": {"a": {"metric": "loss", "when": "nonfinite"}}, "external": ["mine", "count"]}
    rules["rules"] |= {n: {"metric": n, "when": {"below": -1e9}} for n in ("mine", "count")}  # type: ignore[operator]
    health = watch(model, optimizer, rules=rules)
    wanted: list[tuple[float, float, float]] = []

    def run(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            told = loss.detach().to(dtype)
            mine, count = told * 3, torch.full((), step, device="cuda")
            kept.append((told, mine, count))
            health.step(loss=told, metrics={"mine": mine, "count": count})

    kept: list[tuple[torch.Tensor, ...]] = []
    run(3)
    with torch.profiler.profile(acc_events=True) as trace:
        run(10)
        torch.cuda.synchronize()
    health.close()
    assert sum("Memcpy DtoH" in event.name for event in trace.events() or ()) == 10
    wanted = [tuple(map(float, row)) for row in kept]  # type: ignore[misc]
    assert [tuple(health.history(name)[k][1] for name in ("loss", "mine", "count")) for k in range(13)] == wanted


def test_a_loop_whose_updates_cannot_be_held_back_and_that_tells_its_loss_is_not_asked_for_it_twice(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # foreach on CUDA: nothing holds it back
    health = watch(model, optimizer, rules="healthcheck:recommended")
    train(model, optimizer, x, health, 3)
    assert health._source.machine.gate.nothing_held
    assert not health._source._looks_at_passes()


def test_a_loop_that_tells_no_loss_still_has_that_of_its_backward_passes(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    health = watch(model, optimizer, rules="healthcheck:recommended")
    for _ in range(6):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        health.step()
    health.close()
    assert len(health.history("loss")) == 6


def test_gradients_are_held_until_their_update_is_over_and_no_longer(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    health = watch(model, optimizer, rules=RULES)
    inside: list[bool] = []
    running = health._source.machine.running
    optimizer.register_step_pre_hook(lambda *_: inside.append(any(r.gradients is not None for r in running.values())))
    train(model, optimizer, x, health, 3)
    assert inside[1:] == [True, True]
    assert not running
    gone = weakref.ref(next(model.parameters()).grad)
    optimizer.zero_grad()
    assert gone() is None
