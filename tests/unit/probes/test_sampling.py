"""A few elements of every tensor: the same ones at every look, wherever the tensor lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from healthcheck.device.sampling import ElementSampler


def weight(kind: str) -> nn.Parameter:
    values = torch.arange(1.0, 1 + 12 * 20).view(12, 20)
    made: dict[str, Any] = {
        "plain": values,
        "transposed": values.t(),
        "bfloat16": values.bfloat16(),
        "float64": values.double(),
        "complex": torch.complex(values, -values),
        "not dense": values[:, ::2],
        "small": values[0, :3],
    }
    return nn.Parameter(made[kind])


KINDS = ("plain", "transposed", "bfloat16", "float64", "complex", "not dense", "small")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lies", ["alike", "otherwise"])
def test_of_a_gradient_the_same_elements_are_read_as_of_its_weight(kind: str, lies: str) -> None:
    parameter = weight(kind)
    same = parameter.detach().clone()
    parameter.grad = same if lies == "alike" else same.t().contiguous().t()
    sampler = ElementSampler([parameter])

    (values,), (gradients,) = sampler.weights(), sampler.gradients()

    assert torch.equal(values.values, gradients.values)
    assert values.values.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_look_sees_what_has_changed(kind: str) -> None:
    parameter = weight(kind)
    sampler = ElementSampler([parameter])
    before = sampler.weights("before")[0].values.clone()

    with torch.no_grad():
        parameter.mul_(2)

    assert torch.equal(sampler.weights("after")[0].values, 2 * before)


def test_a_weight_that_was_moved_is_read_where_it_is_now() -> None:
    parameter = weight("plain")
    sampler = ElementSampler([parameter])
    before = sampler.weights("before")[0].values.clone()
    left_behind = parameter.data

    parameter.data = parameter.data + 1
    left_behind.zero_()

    assert torch.equal(sampler.weights("after")[0].values, before + 1)


def test_a_gradient_that_is_gone_is_a_row_of_zeros() -> None:
    parameters = [weight("plain"), weight("small")]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    sampler = ElementSampler(parameters)
    assert sampler.gradients()[0].values.any(1).tolist() == [True, True]

    parameters[0].grad = None

    assert sampler.gradients()[0].values.any(1).tolist() == [False, True]
