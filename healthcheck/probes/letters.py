"""One packed vector per step and device, into pinned memory, on the stream that is current."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

from healthcheck.probes.late import LateTable

_FEW = 6
"""Up to so many scalars are concatenated as they are; more are stacked by type first."""


class Parcel:
    """What is to be copied from one device: scalars, and tables as a whole. Each only once."""

    __slots__ = ("scalars", "tables")

    def __init__(self) -> None:
        self.scalars: dict[int, Any] = {}
        self.tables: dict[int, LateTable] = {}

    def add_scalar(self, value: Any) -> None:
        self.scalars[id(value)] = value

    def add_table(self, table: LateTable) -> None:
        self.tables[id(table)] = table

    def pack(self) -> tuple[Any, list[int]]:
        """A float64 vector on the device, and the ids of the scalars in its order; tables come after them.

        Scalars of different types are stacked type by type: converting each on its own would be a
        kernel each, and converting them together could round an int64.
        """
        import torch

        tables = [table.tensor.detach().reshape(-1) for table in self.tables.values() if table.tensor is not None]
        if tables and len(self.scalars) <= _FEW and all(t.dtype is torch.float64 for t in tables):
            few = [value.detach().reshape(1) for value in self.scalars.values()]
            return (torch.cat([*few, *tables]) if len(few) + len(tables) > 1 else tables[0]), list(self.scalars)
        by_type: dict[Any, list[int]] = {}
        for key, value in self.scalars.items():
            by_type.setdefault(value.dtype, []).append(key)
        parts = [
            torch.stack([self.scalars[key].detach().reshape(()) for key in keys]).to(torch.float64)
            for keys in by_type.values()
        ]
        parts += [table.to(torch.float64) for table in tables]
        order = [key for keys in by_type.values() for key in keys]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)), order


class DeviceCopy:
    """One packed vector on its way.

    No device memory is kept: what was freed is used again in the order of its stream, after the copy.
    """

    __slots__ = ("buffer", "count", "device", "event", "numbers", "order", "tables")

    def __init__(self, device: Any, parcel: Parcel, order: list[int], count: int, buffer: Any, event: Any) -> None:
        self.device = device
        self.tables = [(table, table.size) for table in parcel.tables.values() if table.tensor is not None]
        self.order = order
        self.count = count
        self.buffer = buffer
        self.event = event
        self.numbers: dict[int, float] = {}
        """Scalars by the key under which they were added, once they have arrived."""
        for table, _ in self.tables:
            table.shipped(self.wait)

    def wait(self) -> None:
        """Have the numbers, even if that takes a wait."""
        if self.buffer is not None:
            self.event.synchronize()
            self.take()

    def take(self) -> None:
        """The copy is done: read it. The buffer may be used again afterwards."""
        values = array("d")
        values.frombytes(ctypes.string_at(self.buffer.data_ptr(), 8 * self.count))
        self.numbers = dict(zip(self.order, values, strict=False))
        begin = len(self.order)
        for table, size in self.tables:
            table.arrived(values[begin : begin + size])
            begin += size


class PinnedMemory:
    """Sends parcels, and uses buffers and events again."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[Any]] = {}
        self._events: dict[Any, list[Any]] = {}
        self._streams: dict[Any, int] = {}

    def send(self, device: Any, parcel: Parcel) -> DeviceCopy:
        """Start the copy on the current stream of ``device``."""
        import torch

        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self._send(torch, device, parcel)
        return self._send(torch, device, parcel)

    def _send(self, torch: Any, device: Any, parcel: Parcel) -> DeviceCopy:
        stream = torch.cuda.current_stream(device)
        before = self._streams.get(device)
        if before is not None and before != stream.cuda_stream:
            # Values of a step may have been made on the stream that was left.
            stream.wait_stream(torch.cuda.ExternalStream(before, device))
        self._streams[device] = stream.cuda_stream
        packed, order = parcel.pack()
        count = packed.numel()
        size = 1 << (count - 1).bit_length()
        spare = self._buffers.get(size)
        buffer = spare.pop() if spare else torch.empty(size, dtype=torch.float64, pin_memory=True)
        buffer[:count].copy_(packed, non_blocking=True)
        events = self._events.get(device)
        event = events.pop() if events else torch.cuda.Event()
        event.record(stream)
        return DeviceCopy(device, parcel, order, count, buffer, event)

    def receive(self, copy: DeviceCopy) -> dict[int, float]:
        """The scalars of a copy that is done; its tables get their elements."""
        if not copy.numbers:
            copy.take()
        self._events.setdefault(copy.device, []).append(copy.event)
        self._buffers.setdefault(copy.buffer.numel(), []).append(copy.buffer)
        copy.buffer = None
        return copy.numbers
