"""On the card: compiled updates, optimizers inside the backward pass, streams, several devices, losses that gate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_step_path import RULES as STEP_RULES
from test_step_path import model_and_data
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*(TensorFloat32|record_function|accumulate).*")

RULES = {
    "version": 1,
    "rules": {
        "bad": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["skip_update"]},
        "count": {"metric": "grad_nonfinite", "when": {"above": 0}},
        "each": {"metric": "updates.skipped", "when": {"above": 100}},
        "loss": {"metric": "loss", "when": {"above": 1e9}},
        "family": {"metric": "grad_norm[parameter=*]", "when": {"above": 1e9}},
    },
}


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_compiled_step_has_the_graphs_and_bits_that_it_has_without_us(watch: Any, backend: str, fused: bool) -> None:
    from torch._dynamo.utils import counters

    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, x = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        health = watch(model, optimizer, rules=STEP_RULES) if watched else None
        step = torch.compile(optimizer.step, backend=backend)
        norms = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            step()
            if health is not None:
                health.step(loss=loss)
        results.append((weights_of(model), dict(counters["stats"]), sum(counters["graph_break"].values()), norms))
    (plain, graphs, breaks, norms), (seen, graphs_seen, breaks_seen, _) = results
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert graphs_seen == graphs
    assert breaks_seen <= breaks
    assert health is not None
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(norms, rel=1e-4)
    torch._dynamo.reset()


def test_a_bad_compiled_fused_step_is_held_back_on_the_device(watch: Any) -> None:
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        model, x = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        health = watch(model, optimizer, rules=RULES) if watched else None
        step = torch.compile(optimizer.step, backend="eager")
        for number in range(1, 7):
            if not watched and number in (1, 4):
                continue
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            if number in (1, 4):
                next(iter(model.parameters())).grad.view(-1)[0] = math.nan
            step()
            if health is not None:
                health.step(loss=loss)
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert health is not None
    health.close()
    assert [s for s, v in health.history("updates.skipped") if v] == [1, 4]
    torch._dynamo.reset()


def test_optimizers_inside_the_backward_pass_have_their_gradients_measured(watch: Any) -> None:
    """Their hooks run in a thread of the device."""
    model, x = model_and_data()
    wanted, plain = [], None
    for watched in (False, True):
        model, x = model_and_data()
        optimizers = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}
        squares: list[torch.Tensor] = []

        def step(parameter: Any, optimizers: Any = optimizers, squares: Any = squares) -> None:
            squares.append(parameter.grad.double().pow(2).sum())
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        health = watch(model, list(optimizers.values()), rules=RULES) if watched else None
        for _ in range(5):
            squares.clear()
            loss = model(x).pow(2).mean()
            loss.backward()
            if health is not None:
                health.step(loss=loss)
            else:
                wanted.append(math.sqrt(float(torch.stack(squares).sum())))
        for handle in handles:
            handle.remove()
        plain = plain or weights_of(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights_of(model), strict=True))
    assert health is not None
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(wanted, rel=1e-4)
    assert [v for _, v in health.history("grad_nonfinite")] == [0.0] * 5
    assert "inside the backward pass" in health.report["capabilities"]["gaps"]["skip_update"]


def test_a_loss_that_the_loop_tells_later_holds_the_update_back_without_a_wait(watch: Any) -> None:
    rules = {
        "version": 1,
        "rules": {
            "large": {"metric": "loss", "when": {"above": 1e6}, "severity": "error", "then": ["skip_update"]},
            "each": {"metric": "updates.skipped", "when": {"above": 100}},
        },
    }
    raised = torch.full((), 1e9, device="cuda")
    results = []
    for watched in (False, True):
        model, x = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        health = watch(model, optimizer, rules=rules) if watched else None
        for number in range(1, 8):
            if not watched and number == 4:
                continue
            if number > 1:
                torch.cuda.set_sync_debug_mode("error" if watched else "default")
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            if number == 4:
                loss = loss + raised
            loss.backward()
            optimizer.step()
            if health is not None:
                health.step(loss=loss)
        torch.cuda.set_sync_debug_mode("default")
        results.append(weights_of(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert health is not None
    health.close()
    assert [(a.rule, a.fired_step) for a in health.alerts] == [("large", 4)]
    assert health.alerts[0].actions[0].text == "held back the update of step 4"
    assert [s for s, v in health.history("updates.skipped") if v] == [4]


def test_a_loop_on_a_stream_of_its_own_gives_the_values_of_that_stream(watch: Any) -> None:
    """The copy must wait for the stream that made the values, and what is read must not be of a later step."""
    wanted = []
    for watched in (False, True):
        model, x = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        health = watch(model, optimizer, rules=RULES) if watched else None
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        for number in range(12):
            stream = streams[number % 2]
            stream.wait_stream(streams[(number + 1) % 2])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # values are late: a copy on another stream would read old memory
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                if not watched:
                    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                    wanted.append((float(loss.detach()), float(norm)))
                optimizer.step()
                if health is not None:
                    health.step(loss=loss)
        torch.cuda.synchronize()
    assert health is not None
    health.close()
    assert [v for _, v in health.history("loss")] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    assert [v for _, v in health.history("grad_norm")] == pytest.approx([norm for _, norm in wanted], rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_model_on_two_devices_of_one_process_is_measured_as_a_whole(watch: Any) -> None:
    def build() -> tuple[nn.Module, nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return nn.Linear(32, 32).to("cuda:0"), nn.Linear(32, 8).to("cuda:1"), torch.randn(16, 32, device="cuda:0")

    wanted = []
    for watched in (False, True):
        first, second, x = build()
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        health = watch([first, second], optimizer, rules=RULES) if watched else None
        for number in range(1, 7):
            if not watched and number == 4:
                continue
            optimizer.zero_grad()
            loss = second(first(x).relu().to("cuda:1")).pow(2).mean()
            loss.backward()
            if number == 4:
                second.bias.grad[0] = math.nan
            elif not watched:
                wanted.append(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in parameters)))
            optimizer.step()
            if health is not None:
                health.step(loss=loss)
        if not watched:
            plain = [p.detach().clone() for p in parameters]
    assert all(torch.equal(a, b) for a, b in zip(plain, parameters, strict=True))
    assert health is not None
    health.close()
    found = [v for s, v in health.history("grad_norm") if s != 4]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert health.alerts[0].fired_step == 4
