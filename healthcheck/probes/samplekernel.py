"""A few elements of many tensors in one launch: a Triton kernel over a table of their addresses.

Imported only where Triton and a CUDA or ROCm device are there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit  # type: ignore[untyped-decorator]
def _gather(table, rows, tensors, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """``table``: int64 ``[4, tensors]``: address, stride, count, kind. ``rows``: float32 ``[tensors, WIDTH]``."""
    tensor = tl.program_id(0)
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
    tl.store(rows + tensor * WIDTH + element, values)


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

    def read(self, role: str, addresses: list[int]) -> Any:
        """float32 ``[tensors, width]``, new memory at every call; a row of zeros where the address is 0."""
        known = self._known.get(role)
        if known is None or known[0] != addresses:
            staging = torch.empty(4 * self._count, dtype=torch.int64, pin_memory=True)
            (ctypes.c_int64 * (4 * self._count)).from_address(staging.data_ptr())[:] = [*addresses, *self._constant]
            known = self._known[role] = (addresses, staging.to(self.device, non_blocking=True))
        rows = torch.empty(self._count, self.width, dtype=torch.float32, device=self.device)
        with torch.cuda.device(self.device):
            _gather[(self._count,)](known[1], rows, self._count, self.width, num_warps=2)
        return rows
