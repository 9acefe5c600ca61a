"""Experts that a router leaves out: seen in modules, in tensors of all experts, and not where nothing can be said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from healthcheck.device.deferred import value_of
from healthcheck.probes.experts import LOOKS, ExpertProbe, _idle, _used


class Fused(nn.Module):
    """All experts in one tensor, as transformers and torchtitan keep them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 4, 6))


def listed(experts: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))


def local(experts: int) -> nn.Module:
    """Megatron's: one list inside."""
    holder = nn.Module()
    holder.local_experts = listed(experts)
    return holder


def give_gradients(module: nn.Module, to: set[int]) -> None:
    if isinstance(module, Fused):
        module.gate_up.grad = torch.zeros_like(module.gate_up)
        for number in to:
            module.gate_up.grad[number] = 1.0
        return
    experts = list(module.local_experts if hasattr(module, "local_experts") else module)
    for number, expert in enumerate(experts):
        for parameter in expert.parameters():
            parameter.grad = torch.ones_like(parameter) if number in to else None


@pytest.mark.parametrize("make", [listed, local, Fused])
def test_experts_without_gradient_are_not_in_use(make: Callable[[int], nn.Module]) -> None:
    experts = make(4)
    give_gradients(experts, {1, 3})
    assert _used(experts).tolist() == [False, True, False, True]


def test_a_gradient_of_zeros_is_none() -> None:
    experts = listed(4)
    give_gradients(experts, {0, 1})
    for parameter in experts[1].parameters():
        parameter.grad.zero_()
    assert _used(experts).tolist() == [True, False, False, False]


def test_frozen_experts_are_not_judged() -> None:
    experts = listed(4)
    give_gradients(experts, {0})
    experts[2].requires_grad_(False)
    assert _used(experts) is None


def test_an_expert_that_was_used_at_any_look_is_not_idle() -> None:
    looks = [torch.tensor([True, False, False, False]), torch.tensor([False, True, False, False])]
    assert float(_idle(looks)) == 0.5


def test_where_no_expert_has_a_gradient_the_router_is_not_to_blame() -> None:
    assert float(_idle([torch.zeros(4, dtype=torch.bool)])) == 0.0


class Event:
    def __init__(self, model: object, step: int) -> None:
        self.model, self.optimizer, self.step, self.run = model, object(), step, None


class Always:
    def due(self, key: str, step: int) -> bool:
        return True


class View:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_modules(self) -> list[tuple[str, nn.Module]]:
        return list(self.module.named_modules())


def test_the_layer_with_most_idle_experts_is_named_after_ten_looks() -> None:
    model = nn.Module()
    for name, used in (("first", {0, 1, 2, 3}), ("second", {2})):
        layer = nn.Module()
        layer.router, layer.experts = nn.Linear(4, 4), listed(4)
        setattr(model, name, layer)
        give_gradients(layer.experts, used)
    probe = ExpertProbe()
    found = [list(probe.sample(Event(View(model), step), Always())) for step in range(1, LOOKS + 1)]
    assert not any(found[:-1])
    (sample,) = found[-1]
    assert value_of(sample.value) == 0.75
    assert sample.detail() == {"layer": "second.experts", "experts": 4}


def test_experts_without_a_router_are_parts_like_others() -> None:
    model = nn.Module()
    model.experts = listed(4)
    give_gradients(model.experts, {0})
    probe = ExpertProbe()
    assert list(probe.sample(Event(View(model), 1), Always())) == []
    assert probe.rests_until > 1
