"""A few scalars to the host by the driver's own copies, past torch's dispatch.

A ``copy_`` of one number costs the host some 65 microseconds in a loop that is bound by its host (H100, GPT
10M: much of it is code that has left the caches since the step before), the driver's copy a fraction of that.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.probes.transfer.late import ROOM, Room

_WIDTH = 8
"""Bytes of a place."""

Reader = Callable[[Any, int], float]


class RawPage:
    """Pinned memory that holds each scalar as it stood on the device, read by its type when somebody asks."""

    __slots__ = ("_spare", "address", "memory", "readers", "tensor")

    def __init__(self, spare: list[tuple[Any, Any, int]], readers: Sequence[Reader]) -> None:
        try:
            self.tensor, self.memory, self.address = spare.pop()
        except IndexError:
            import torch

            with torch.inference_mode(False):  # it is used again in training
                self.tensor = torch.empty(ROOM * _WIDTH, dtype=torch.uint8, pin_memory=True)
            self.address = self.tensor.data_ptr()
            self.memory = (ctypes.c_char * (ROOM * _WIDTH)).from_address(self.address)
        self.readers = readers
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append((self.tensor, self.memory, self.address))

    def __getitem__(self, index: int) -> float:
        return self.readers[index](self.memory, index * _WIDTH)


class RawCopies:
    """Sends scalars of one device. Raises nothing: what it cannot send it leaves to torch.

    :param driver: the CUDA driver's library.
    """

    spare: list[tuple[Any, Any, int]] = []  # noqa: RUF012  pages are never given back: a copy may still be under way
    """Of all sessions: torch does not know of our copies, and would hand a page that we let go to somebody else."""

    def __init__(self, torch: Any, driver: Any) -> None:
        self._torch = torch
        self._to_host = driver.cuMemcpyDtoHAsync_v2
        self._to_host.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._within = driver.cuMemcpyDtoDAsync_v2
        self._within.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._sizes_and_readers = kinds(torch)

    def send(self, stream: int, scalars: Sequence[Any], pad: Room) -> RawPage | None:
        """Start the copy; None where torch has to do it.

        :param stream: raw handle, of the current device, on which all scalars are.
        :param scalars: tensors of one element.
        :param pad: room of :data:`ROOM` float64 elements there, in which several are put side by side.
        """
        tensor, known = self._torch.Tensor, self._sizes_and_readers
        if len(scalars) > ROOM:
            return None
        readers, sizes = [], []
        for value in scalars:
            kind = known.get(value.dtype)
            if kind is None or (type(value) is not tensor and type(value) is not self._torch.nn.Parameter):
                return None
            if value.is_neg():  # the minus is not in memory yet
                return None
            sizes.append(kind[0])
            readers.append(kind[1])
        page = RawPage(self.spare, readers)
        if len(scalars) == 1:
            failed = self._to_host(page.address, scalars[0].data_ptr(), sizes[0], stream)
            return None if failed else page
        at = pad.whole.data_ptr()
        for place, (value, size) in enumerate(zip(scalars, sizes, strict=True)):
            if self._within(at + place * _WIDTH, value.data_ptr(), size, stream):
                return None
        return None if self._to_host(page.address, at, len(scalars) * _WIDTH, stream) else page


def kinds(torch: Any) -> dict[Any, tuple[int, Reader]]:
    """torch type -> bytes of an element, and what makes a float of them."""
    formats = {
        torch.float64: "<d",
        torch.float32: "<f",
        torch.float16: "<e",
        torch.int64: "<q",
        torch.int32: "<i",
        torch.bool: "<?",
    }
    found: dict[Any, tuple[int, Reader]] = {}
    for dtype, text in formats.items():
        found[dtype] = (struct.calcsize(text), _reader(text))
    found[torch.bfloat16] = (2, _bfloat16)
    return found


def _reader(text: str) -> Reader:
    unpack = struct.Struct(text).unpack_from

    def read(memory: Any, offset: int) -> float:
        return float(unpack(memory, offset)[0])

    return read


def _bfloat16(memory: Any, offset: int) -> float:
    """The upper half of a float32."""
    return float(struct.unpack("<f", b"\0\0" + memory[offset : offset + 2])[0])


@functools.cache
def raw_copies() -> RawCopies | None:
    """None where there is no CUDA driver that knows these copies (ROCm has another)."""
    import torch

    if not torch.version.cuda:
        return None
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return RawCopies(torch, ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None
