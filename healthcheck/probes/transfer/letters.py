"""One packed vector per step and device, into pinned memory, on the stream that is current."""

from __future__ import annotations

import ctypes
from typing import Any

from healthcheck.probes.transfer.late import ROOM, LateTable, Room
from healthcheck.probes.transfer.rawcopy import RawPage, raw_copies

_FEW = 4
"""Up to so many scalars are written one by one; more are stacked by type first."""


class Parcel:
    """What is to come from one device: scalars, and tables as a whole. Each only once."""

    __slots__ = ("scalars", "tables", "written")

    def __init__(self) -> None:
        self.scalars: dict[int, Any] = {}
        self.tables: dict[int, LateTable] = {}
        self.written: dict[int, LateTable] = {}
        """Tables that the device writes to the host itself."""

    def add_scalar(self, value: Any) -> None:
        self.scalars[id(value)] = value

    def add_table(self, table: LateTable) -> None:
        (self.tables if table.own_page is None else self.written)[id(table)] = table

    def pack(self, pad: Room) -> tuple[Any, int]:
        """A float64 vector on the device, scalars first, and where its tables begin.

        :param pad: room of :data:`ROOM` elements, for scalars without a table.
        """
        scalars = list(self.scalars.values())
        if len(self.tables) <= 1 and len(scalars) <= ROOM:
            (table,) = self.tables.values() or (None,)
            room = pad if table is None else table.room
            if room is not None:
                _write(scalars, room)
                return room.whole, room.size
        return self._joined(scalars), len(scalars)

    def _joined(self, scalars: list[Any]) -> Any:
        """Several tables, or more scalars than there is room for: a vector of its own."""
        import torch

        tables = [table.tensor.detach().reshape(-1) for table in self.tables.values() if table.tensor is not None]
        if not scalars:
            parts = tables
        else:
            first = torch.empty(len(scalars), dtype=torch.float64, device=scalars[0].device)
            _write(scalars, Room(first, len(scalars)))
            parts = [first, *tables]
        return torch.cat([part.to(torch.float64) for part in parts]) if len(parts) > 1 else parts[0]


def _write(scalars: list[Any], room: Room) -> None:
    """Scalars to the first elements of a room.

    Those of different types are stacked type by type: converting each on its own would be a kernel
    each, and converting them together could round an int64.
    """
    if len(scalars) <= _FEW:
        for slot, value in zip(room.slots(len(scalars)), scalars, strict=True):
            slot.copy_(value.detach().reshape(()) if value.dim() else value.detach())
        return
    import torch

    by_type: dict[Any, list[int]] = {}
    for index, value in enumerate(scalars):
        by_type.setdefault(value.dtype, []).append(index)
    for members in by_type.values():
        stacked = torch.stack([scalars[i].detach().reshape(()) for i in members])
        if members[-1] - members[0] == len(members) - 1:
            room.whole[members[0] : members[-1] + 1].copy_(stacked)
        else:
            for i, value in zip(members, stacked.unbind(), strict=True):
                room.whole[i].copy_(value)


class Page:
    """Pinned memory that a copy goes to; used again once nobody can ask for its numbers any more."""

    __slots__ = ("_spare", "address", "numbers", "tensor")

    def __init__(self, spare: list[tuple[Any, Any, int]], count: int) -> None:
        if spare:
            self.tensor, self.numbers, self.address = spare.pop()
        else:
            import torch

            with torch.inference_mode(False):  # it is used again in training
                self.tensor = torch.empty(count, dtype=torch.float64, pin_memory=True)
            self.address = self.tensor.data_ptr()
            memory: Any = ctypes.c_double * count
            self.numbers = memory.from_address(self.address)
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append((self.tensor, self.numbers, self.address))

    def __getitem__(self, key: Any) -> Any:
        return self.numbers[key]

    def __len__(self) -> int:
        return len(self.numbers)


class DeviceCopy:
    """One packed vector on its way.

    No device memory is kept: what was freed is used again in the order of its stream, after the copy.
    """

    __slots__ = ("begin", "device", "event", "order", "page", "tables", "written")

    def __init__(self, device: int, parcel: Parcel, begin: int, page: Page | RawPage | None, event: Any) -> None:
        self.device = device
        self.tables = list(parcel.tables.values())
        self.written = [(table, table.own_page) for table in parcel.written.values()]
        self.order = {key: index for index, key in enumerate(parcel.scalars)}
        """Key under which a scalar was added -> its place on the page."""
        self.begin = begin
        self.page = page
        self.event = event
        for table in self.tables:
            table.shipped(self.wait)
        for table, _ in self.written:
            table.shipped(self.wait)

    def wait(self) -> None:
        """Have the numbers, even if that takes a wait."""
        self.event.synchronize()
        self.take()

    def take(self) -> None:
        """The copy is done: tell the tables where their numbers are. They are read when somebody asks."""
        tables, self.tables = self.tables, []
        begin = self.begin
        for table in tables:
            size = table.size
            table.arrived(self.page, begin)  # type: ignore[arg-type]
            begin += size
        written, self.written = self.written, []
        for table, page in written:
            table.arrived(page, 0)


class PinnedMemory:
    """Sends parcels, and uses pages and events again."""

    def __init__(self) -> None:
        self._pages: dict[int, list[tuple[Any, Any, int]]] = {}
        self._events: dict[int, list[Any]] = {}
        self._streams: dict[int, tuple[int, Any]] = {}
        self._pads: dict[int, Room] = {}

    def send(self, device: int, parcel: Parcel) -> DeviceCopy:
        """Start the copy on the current stream of a device, given by its index."""
        import torch

        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self._send(torch, device, parcel)
        return self._send(torch, device, parcel)

    def _send(self, torch: Any, device: int, parcel: Parcel) -> DeviceCopy:
        raw = torch._C._cuda_getCurrentRawStream(device)
        known = self._streams.get(device)
        if known is None or known[0] != raw:
            stream = torch.cuda.current_stream(device)
            if known is not None:
                stream.wait_stream(known[1])  # values of a step may have been made on the stream that was left
            known = self._streams[device] = (raw, stream)
        begin, page = self._copy(torch, device, raw, parcel)
        events = self._events.setdefault(device, [])
        event = events.pop() if events else torch.cuda.Event()
        event.record(known[1])
        return DeviceCopy(device, parcel, begin, page, event)

    def _copy(self, torch: Any, device: int, stream: int, parcel: Parcel) -> tuple[int, Page | RawPage | None]:
        """Where the tables begin on the page that everything is copied to; no page where nothing is to be copied."""
        if not parcel.tables:
            if not parcel.scalars:
                return 0, None
            copies, scalars = raw_copies(), list(parcel.scalars.values())
            raw = copies.send(stream, scalars, self._pad(torch, device)) if copies is not None else None
            if raw is not None:
                return len(scalars), raw
        packed, begin = parcel.pack(self._pad(torch, device))
        count = packed.numel()
        page = Page(self._pages.setdefault(count, []), count)
        page.tensor.copy_(packed, non_blocking=True)
        return begin, page

    def _pad(self, torch: Any, device: int) -> Room:
        """Where scalars without a table are put side by side: of this mailbox alone, whose copies follow each other."""
        pad = self._pads.get(device)
        if pad is None:
            with torch.inference_mode(False):
                vector = torch.zeros(ROOM, dtype=torch.float64, device=torch.device("cuda", device))
            pad = self._pads[device] = Room(vector, ROOM)
        return pad

    def receive(self, copy: DeviceCopy) -> None:
        """A copy is done."""
        copy.take()
        self._events[copy.device].append(copy.event)
