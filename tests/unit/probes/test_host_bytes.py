"""The bytes of a tensor, without numpy."""

from __future__ import annotations

import array

import pytest
import torch

from healthcheck.device.tensors import host_bytes


def test_the_bytes_are_those_of_the_elements() -> None:
    assert host_bytes(torch.tensor([1.0, -2.5])) == array.array("f", [1.0, -2.5]).tobytes()
    assert host_bytes(torch.empty(0)) == b""


def test_a_part_of_a_tensor_gives_its_own_bytes() -> None:
    whole = torch.arange(6, dtype=torch.int16)
    assert host_bytes(whole[2:4]) == array.array("h", [2, 3]).tobytes()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(ValueError, match="holds no memory"):
        host_bytes(torch.ones(3))
