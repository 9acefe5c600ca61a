"""A few elements of many tensors in one launch: a Triton kernel over a table of their addresses.

Imported only where Triton and a CUDA or ROCm device are there.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from healthcheck.device.shortcuts import direct_launch

_launches: dict[tuple[Any, ...], Any] = {}
"""Direct launches of compiled variants; samplers come and go, and compile to the same ones."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit  # type: ignore[untyped-decorator]
def _elements(table, tensor, tensors, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sampled elements of one tensor as float32, zeros behind them.

    ``table``: int64 ``[4, tensors]`` of addresses, strides, counts and kinds, as in :data:`KINDS`.
    """
    address = tl.load(table + tensor)
    stride = tl.load(table + tensors + tensor)
    count = tl.load(table + 2 * tensors + tensor)
    kind = tl.load(table + 3 * tensors + tensor)
    element = tl.arange(0, WIDTH)
    there = (element < count) & (address != 0)
    values = tl.zeros([WIDTH], tl.float32)
    if kind == 0:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + element * stride, mask=there, other=0.0)
    elif kind == 1:
        half = tl.load(address.to(tl.pointer_type(tl.uint16)) + element * stride, mask=there, other=0)
        values = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)  # bf16 is the upper half of a float32
    else:
        values = tl.load(address.to(tl.pointer_type(tl.float16)) + element * stride, mask=there, other=0.0).to(
            tl.float32
        )
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _gather(table, rows, tensors, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """``table``: int64 ``[4, tensors]``: address, stride, count, kind. ``rows``: float32 ``[tensors, WIDTH]``."""
    tensor = tl.program_id(0)
    tl.store(rows + tensor * WIDTH + tl.arange(0, WIDTH), _elements(table, tensor, tensors, WIDTH))


@triton.jit  # type: ignore[untyped-decorator]
def _compare(table, before, gradients, result, tensors, WIDTH: tl.constexpr, KNOWN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same elements now against rows read before. ``result``: float64 ``[6, tensors]``, rows as in
    :data:`healthcheck.device.sampling.ROWS`; ``gradients``: rows like ``before``, read where ``KNOWN``."""
    tensor = tl.program_id(0)
    element = tl.arange(0, WIDTH)
    values = _elements(table, tensor, tensors, WIDTH)
    old = tl.load(before + tensor * WIDTH + element)
    delta = values - old
    stayed = delta == 0.0
    tl.store(result + tensor, tl.sum(delta * delta, axis=0).to(tl.float64))
    tl.store(result + tensors + tensor, tl.sum(old * old, axis=0).to(tl.float64))
    tl.store(result + 2 * tensors + tensor, tl.sum(tl.where(stayed, 0, 1), axis=0).to(tl.float64))
    if KNOWN:
        gradient = tl.load(gradients + tensor * WIDTH + element)
        active = (gradient - gradient == 0.0) & (gradient != 0.0)
        tl.store(result + 3 * tensors + tensor, tl.sum(active.to(tl.int32), axis=0).to(tl.float64))
        lost = (active & stayed).to(tl.int32)
        tl.store(result + 4 * tensors + tensor, tl.sum(lost, axis=0).to(tl.float64))
        largest = tl.max(tl.where(active, tl.abs(gradient), 0.0), axis=0)
        tl.store(result + 5 * tensors + tensor, largest.to(tl.float64))


class ElementTable:
    """Reads the same elements of the same tensors again and again.

    :param kinds: type of each tensor; a key of :data:`KINDS`.
    :param strides: distance between two sampled elements; ``counts``: how many there are.
    :param width: elements of a row; a power of two. Rows of smaller tensors are filled up with zeros.
    """

    def __init__(
        self, device: Any, kinds: Sequence[Any], strides: Sequence[int], counts: Sequence[int], width: int
    ) -> None:
        self.device = device
        self.width = width
        self._constant = [*strides, *counts, *(KINDS[kind] for kind in kinds)]
        self._count = len(kinds)
        self._known: dict[str, tuple[list[int], Any]] = {}
        self._zeros: Any = None

    def read(self, role: str, addresses: list[int]) -> Any:
        """float32 ``[tensors, width]``, new memory at every call; a row of zeros where the address is 0."""
        rows = torch.empty(self._count, self.width, dtype=torch.float32, device=self.device)
        self._launch(_gather, self._uploaded(role, addresses), rows, self._count, self.width)
        return rows

    def compare(self, role: str, addresses: list[int], before: Any, gradients: Any) -> Any:
        """float64 ``[6 * tensors]``: what became of rows that :meth:`read` gave, in the order of
        :data:`healthcheck.device.sampling.ROWS`.

        :param gradients: rows of gradients at the same elements, or None.
        """
        rows = torch.zeros if gradients is None else torch.empty
        result = rows(6 * self._count, dtype=torch.float64, device=self.device)
        table, known = self._uploaded(role, addresses), gradients is not None
        self._launch(_compare, table, before, gradients if known else before, result, self._count, self.width, known)
        return result

    def zeros(self) -> Any:
        """Rows to compare with where the values themselves are wanted."""
        if self._zeros is None:
            self._zeros = torch.zeros(self._count, self.width, dtype=torch.float32, device=self.device)
        return self._zeros

    def _uploaded(self, role: str, addresses: list[int]) -> Any:
        known = self._known.get(role)
        if known is None or (known[0] is not addresses and known[0] != addresses):
            staging = torch.empty(4 * self._count, dtype=torch.int64, pin_memory=True)
            content = array("q", (*addresses, *self._constant)).tobytes()
            ctypes.memmove(staging.data_ptr(), content, len(content))
            known = self._known[role] = (addresses, staging.to(self.device, non_blocking=True))
        return known[1]

    def _launch(self, kernel: Any, *arguments: Any) -> None:
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                self._launch(kernel, *arguments)
            return
        key = (id(kernel), self.device.index, self._count, self.width, arguments[-1])  # all that a variant depends on
        known = _launches.get(key)
        if known is None:
            compiled = kernel[(self._count,)](*arguments, num_warps=2)
            _launches[key] = direct_launch(compiled, self._count) or False
        elif known:
            launch, handles = known
            given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            launch(_raw_stream(self.device), *handles, *given)
        else:
            kernel[(self._count,)](*arguments, num_warps=2)


def _raw_stream(device: Any) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))
