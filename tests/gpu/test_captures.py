"""Compiled models and steps, graphs, checkpointing, accumulation, optimizer in backward: right values, nothing disturbed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_step_path import RULES, model_and_data, train
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")


def plain_norms(steps: int = 6) -> list[float]:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
    return norms


def test_a_compiled_model_is_neither_broken_nor_compiled_again(watch: Any) -> None:
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    model, x = model_and_data()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    health = watch(model, optimizer, rules=RULES)
    counters.clear()
    train(compiled, optimizer, x, health, 6)
    health.close()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(plain_norms(), rel=1e-4)


def test_a_compiled_optimizer_step_is_seen(watch: Any) -> None:
    torch._dynamo.reset()
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    health = watch(model, optimizer, rules=RULES)
    step = torch.compile(lambda: optimizer.step())
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        step()
        health.step(loss=loss)
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(plain_norms(), rel=1e-4)


def test_a_captured_step_is_captured_without_us_and_replays(watch: Any) -> None:
    model, x = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    health = watch(model, optimizer, rules=RULES)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(model, optimizer, x, health, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    for _ in range(5):
        graph.replay()
        health.step(loss=loss)
    torch.cuda.synchronize()
    health.close()
    losses = [v for _, v in health.history("loss")]
    assert len(losses) >= 8
    assert losses[-1] < losses[0]


def test_checkpointing_and_accumulation_give_the_sum_of_the_micro_batches(watch: Any) -> None:
    wanted = []
    for watched in (False, True):
        model, x = model_and_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        health = watch(model, optimizer, rules=RULES) if watched else None
        for _ in range(4):
            optimizer.zero_grad()
            for part in x.chunk(4):
                loss = checkpoint(model, part, use_reentrant=False).pow(2).mean() / 4
                loss.backward()
            if not watched:
                wanted.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            optimizer.step()
            if health is not None:
                health.step(loss=loss)
    assert health is not None
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(wanted, rel=1e-4)


def test_bf16_and_mixed_parameters_are_measured_in_one_pass(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    health = watch(model, optimizer, rules=RULES)
    x = torch.randn(16, 64, device="cuda")
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model[1](model[0](x.bfloat16()).float()).sin().mean()
        loss.backward()
        wanted.append(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters())))
        optimizer.step()
        health.step(loss=loss)
    health.close()
    assert [v for _, v in health.history("grad_norm")] == pytest.approx(wanted, rel=1e-5)
