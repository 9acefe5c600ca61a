"""Ways past torch and Triton that save host time. Each is taken where it is known to work, beside the plain way.

*Copies by the driver*: a ``copy_`` of one number costs the host some 65 microseconds in a loop that is bound by its
host (H100, GPT 10M: much of it is code that has left the caches since the step before), the driver's own copy a
fraction of that. *Direct launches*: Triton's dispatch over types, alignments and settings costs the host several times
what the launch of a kernel does, at every call.

``HEALTHCHECK_SHORTCUTS=off`` switches both off. Numbers are the same either way.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.device.deferred import SLOTS, Slots

ENABLED = os.environ.get("HEALTHCHECK_SHORTCUTS", "").lower() not in ("off", "0", "false")
"""Whether shortcuts are taken at all."""

_WIDTH = 8
"""Bytes of a place."""

Reader = Callable[[Any, int], float]


class DriverPage:
    """Pinned memory that holds each scalar as it stood on the device, read by its type when somebody asks."""

    __slots__ = ("_spare", "address", "memory", "readers", "tensor")

    def __init__(self, spare: list[tuple[Any, Any, int]], readers: Sequence[Reader]) -> None:
        try:
            self.tensor, self.memory, self.address = spare.pop()
        except IndexError:
            import torch

            with torch.inference_mode(False):  # it is used again in training
                self.tensor = torch.empty(SLOTS * _WIDTH, dtype=torch.uint8, pin_memory=True)
            self.address = self.tensor.data_ptr()
            self.memory = (ctypes.c_char * (SLOTS * _WIDTH)).from_address(self.address)
        self.readers = readers
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append((self.tensor, self.memory, self.address))

    def __getitem__(self, index: int) -> float:
        return self.readers[index](self.memory, index * _WIDTH)


class DriverCopies:
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
        self._formats = formats(torch)

    def send(self, stream: int, scalars: Sequence[Any], slots: Slots) -> DriverPage | None:
        """Start the copy; None where torch has to do it.

        :param stream: raw handle, of the current device, on which all scalars are.
        :param scalars: tensors of one element.
        :param slots: :data:`SLOTS` float64 elements there, in which several are put side by side.
        """
        tensor, known = self._torch.Tensor, self._formats
        if len(scalars) > SLOTS:
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
        page = DriverPage(self.spare, readers)
        if len(scalars) == 1:
            failed = self._to_host(page.address, scalars[0].data_ptr(), sizes[0], stream)
            return None if failed else page
        at = slots.whole.data_ptr()
        for place, (value, size) in enumerate(zip(scalars, sizes, strict=True)):
            if self._within(at + place * _WIDTH, value.data_ptr(), size, stream):
                return None
        return None if self._to_host(page.address, at, len(scalars) * _WIDTH, stream) else page


def formats(torch: Any) -> dict[Any, tuple[int, Reader]]:
    """torch's type -> bytes of an element, and what makes a float of them."""
    codes = {
        torch.float64: "<d",
        torch.float32: "<f",
        torch.float16: "<e",
        torch.int64: "<q",
        torch.int32: "<i",
        torch.bool: "<?",
    }
    found: dict[Any, tuple[int, Reader]] = {}
    for dtype, text in codes.items():
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
def driver_copies() -> DriverCopies | None:
    """None where torch copies: there is no CUDA driver that knows these copies (ROCm has another), or no shortcut is
    wanted."""
    import torch

    if not ENABLED or not torch.version.cuda:
        return None
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return DriverCopies(torch, ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
    return None


def direct_launch(compiled: Any, programs: int) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """A function for a compiled kernel on so many programs, and what it is given behind the stream:
    ``launch(stream, *handles, *arguments)``.

    Arguments are all those of the kernel in order, tensors as addresses, constants included; ``stream`` is the
    raw handle. None where this Triton is not known to take it so, or no shortcut is wanted. Profilers that hook into
    Triton's launcher do not see these launches.
    """
    if not ENABLED:
        return None
    import triton

    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version == (3, 6) and all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        compiled._init_handles()
        # No function of ours in between: it is called in every step.
        launch = functools.partial(compiled.run, programs, 1, 1)
        return launch, (compiled.function, compiled.packed_metadata, None, None, None)
    if version > (3, 6) and hasattr(type(compiled), "__getitem__"):
        runner = compiled[(programs, 1, 1)]
        return lambda stream, *arguments: runner(*arguments, stream=stream), ()
    return None
