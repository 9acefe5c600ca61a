"""Scalars that travel as they stand in memory are read by their type. The copy itself needs a card: tests/gpu."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from healthcheck.device.deferred import SLOTS, Slots
from healthcheck.device.shortcuts import DriverCopies, DriverPage, formats


def page_of(values: list[torch.Tensor]) -> DriverPage:
    """A page as the driver would leave it: each value's bytes at the beginning of its place."""
    memory = (ctypes.c_char * (8 * SLOTS))()
    known = formats(torch)
    for place, value in enumerate(values):
        size = known[value.dtype][0]
        assert size == value.element_size()
        ctypes.memmove(ctypes.addressof(memory) + 8 * place, value.data_ptr(), size)
    return DriverPage([(None, memory, 0)], [known[value.dtype][1] for value in values])


@pytest.mark.parametrize("dtype", list(formats(torch)), ids=str)
def test_every_type_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    values = [torch.tensor(number, dtype=dtype) for number in (0, 1, 3.140625, 1e4)]
    page = page_of(values)
    assert [page[place] for place in range(4)] == [float(value) for value in values]


@pytest.mark.parametrize("dtype", [d for d in formats(torch) if d.is_floating_point], ids=str)
def test_what_is_not_finite_arrives_as_it_is(dtype: torch.dtype) -> None:
    page = page_of([torch.tensor(number, dtype=dtype) for number in (math.nan, math.inf, -math.inf)])
    assert math.isnan(page[0])
    assert [page[1], page[2]] == [math.inf, -math.inf]


def test_types_mix_on_one_page() -> None:
    values = [torch.tensor(-2.5, dtype=torch.bfloat16), torch.tensor(2**53 - 1), torch.tensor(0.1)]
    page = page_of(values)
    assert [page[0], page[1], page[2]] == [-2.5, float(2**53 - 1), pytest.approx(0.1)]


def test_a_page_is_used_again_when_nobody_can_ask_for_its_numbers() -> None:
    spare: list[tuple[object, object, int]] = [(None, (ctypes.c_char * (8 * SLOTS))(), 0)]
    page = DriverPage(spare, [])
    assert spare == []
    del page
    assert len(spare) == 1


class _Copy:
    """Stands for a function of the driver, which needs a card: copies within the memory of the host."""

    argtypes: object = None

    def __call__(self, target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        return 0


class _Driver:
    cuMemcpyDtoHAsync_v2 = _Copy()
    cuMemcpyDtoDAsync_v2 = _Copy()


def test_several_scalars_are_put_side_by_side_on_the_pad_of_the_mailbox_that_sends_them() -> None:
    copies = DriverCopies(torch, _Driver)
    pads = [Slots(torch.full((SLOTS,), -1.0, dtype=torch.float64), SLOTS) for _ in range(2)]
    memory = (ctypes.c_char * (8 * SLOTS))()
    copies.spare = [(None, memory, ctypes.addressof(memory))]
    page = copies.send(0, [torch.tensor(2.5), torch.tensor(7)], pads[0])
    assert page is not None
    assert [page[0], page[1]] == [2.5, 7.0]
    assert pads[0].whole[2:].eq(-1).all()
    assert pads[1].whole.eq(-1).all()
