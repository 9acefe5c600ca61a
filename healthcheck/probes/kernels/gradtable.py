"""The table of gradient addresses that the kernel walks, and where its results go.

Imported only where Triton and a CUDA or ROCm device are there.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from healthcheck.probes.kernels.gradients import CHUNK, ELEMENTS, FIELDS, TILE_COLUMNS, TILE_ROWS, WARPS, statistics
from healthcheck.probes.kernels.launching import direct_launch
from healthcheck.probes.transfer.late import ROOM, LateTable, Room
from healthcheck.probes.transfer.letters import Page
from healthcheck.probes.weights.sampling import dense


def usable(tensor: Any) -> bool:
    """Whether the kernel can read this local, dense tensor: real, of a known type, without gaps."""
    if tensor.dtype not in ELEMENTS or tensor.layout is not torch.strided or tensor.device.type != "cuda":
        return False
    if tensor.element_size() == 1 and (torch.version.hip or torch.cuda.get_device_capability(tensor.device) < (8, 9)):
        return False
    return not tensor.numel() or dense(tensor)


class GradientTable:
    """What the kernel needs to know of a list of tensors on one device; everything but addresses is constant.

    :param tensors: local dense tensors for which :func:`usable` is true. They are not kept.

    Uses 24 bytes of device memory per 32,768 elements and 24 per tensor.
    """

    fields = FIELDS

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.device = tensors[0].device
        self.count = len(tensors)
        self._aligned = [t.data_ptr() % 16 == 0 for t in tensors]
        lengths = [int(t.numel()) for t in tensors]
        # An empty tensor (a shard of which this rank holds nothing) has one chunk without elements.
        per_tensor = [max(1, -(-n // CHUNK)) for n in lengths]
        self._chunks = sum(per_tensor)
        # Chunks of one type and alignment stand together: one launch each, usually one in all.
        self._launches: list[tuple[Any, bool, int, int]] = []
        owners: list[int] = []
        order: dict[tuple[Any, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            order.setdefault((tensor.dtype, self._aligned[index]), []).append(index)
        starts = [0] * (self.count + 1)
        position = 0
        numbering: list[int] = []
        for (dtype, aligned), members in order.items():
            begin = position
            for index in members:
                starts[len(numbering)] = position
                owners += [len(numbering)] * per_tensor[index]
                numbering.append(index)
                position += per_tensor[index]
            self._launches.append((ELEMENTS[dtype], aligned, begin, position - begin))
        starts[self.count] = position
        self._order = numbering
        self.in_order = numbering == list(range(self.count))
        self.columns = sorted(range(self.count), key=numbering.__getitem__)
        """Position in the list given -> column of the result."""

        def upload(values: list[int], dtype: Any) -> Any:
            return torch.tensor(values, dtype=dtype, pin_memory=True).to(self.device, non_blocking=True)

        self._lengths = upload([lengths[i] for i in numbering], torch.int64)
        self._starts = upload(starts, torch.int32)
        self._owners = upload(owners, torch.int32)
        self._partial = torch.empty(5, self._chunks, dtype=torch.float32, device=self.device)
        self._arrived = torch.zeros(self.count + 1, dtype=torch.int32, device=self.device)
        self._addresses = torch.empty(self.count, dtype=torch.int64, device=self.device)
        self._known: list[int] = []
        self._last: LateTable | None = None
        self._memory: Any = None
        self._result = 0
        self._pages: list[tuple[Any, Any, int]] = []
        self._all_aligned = all(self._aligned)
        self._stream = _raw_stream(self.device)
        self._left = torch.cuda.current_stream(self.device)
        """The stream of the last launch. An ``ExternalStream`` of address 0 would be another than the default one."""
        self._fixed = [
            t.data_ptr()
            for t in (self._addresses, self._lengths, self._starts, self._owners, self._partial, self._arrived)
        ]
        self._direct: list[Any] = []  # launchers of compiled kernels: no dispatch over types and alignments

    def measure(self, addresses: list[int], *, final: bool = True) -> LateTable:
        """Statistics as a float64 vector on the device: five totals, then five rows with a column per tensor.

        :param addresses: ``data_ptr()`` of the tensors, in the order of the list given. Lengths, types
            and alignment must be those that the table was made for: see :meth:`fits`.
        :param final: whether nobody changes the vector any more; then the device writes it to the host as well.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self._measure(addresses, final)
        return self._measure(addresses, final)

    def _measure(self, addresses: list[int], final: bool) -> LateTable:
        stream = _raw_stream(self.device)
        if stream != self._stream:
            # The scratch memory of the step before may still be in use on the stream that was left.
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._left)
            self._stream, self._left = stream, current
        if addresses is not self._known and addresses != self._known:
            self._upload(addresses)
        table = self._new_table()
        page: Page | None = None
        if final:
            page = Page(self._pages, table.size)
            table.own_page = page
        if self._direct:
            target = self._result if page is None else page.address
            for launch, constants in self._direct:
                launch(stream, *self._fixed, self._result, target, *constants)
            return table
        for element, aligned, offset, chunks in self._launches:
            constants = (offset, self.count, self._chunks, element, aligned, CHUNK, TILE_ROWS, TILE_COLUMNS)
            compiled = statistics[(chunks,)](
                self._addresses,
                self._lengths,
                self._starts,
                self._owners,
                self._partial,
                self._arrived,
                table.tensor,
                table.tensor if page is None else page.tensor,
                *constants,
                num_warps=WARPS,
            )
            launch = direct_launch(compiled, chunks)
            if launch is not None:
                self._direct.append((launch, constants))
        return table

    def _new_table(self) -> LateTable:
        """Where the next result goes: memory of the last one, once its copy to the host was queued behind it."""
        last = self._last
        if last is None or last.tensor is not None:
            fields = len(FIELDS)
            whole = torch.empty(ROOM + fields * (self.count + 1), dtype=torch.float64, device=self.device)
            self._memory = (whole[ROOM:], Room(whole, ROOM))
            self._result = self._memory[0].data_ptr()
        self._last = LateTable(*self._memory)
        return self._last

    def fits(self, addresses: list[int]) -> bool:
        """Whether alignments are still those for which the table was made."""
        if self._all_aligned:
            return not functools.reduce(operator.or_, addresses, 0) & 15
        return [not address & 15 for address in addresses] == self._aligned

    def _upload(self, addresses: list[int]) -> None:
        self._known = addresses
        ordered = addresses if self.in_order else [addresses[i] for i in self._order]
        # Torch keeps the pinned block until the copy has read it, so it can be let go at once.
        staging = torch.empty(self.count, dtype=torch.int64, pin_memory=True)
        ctypes.memmove(staging.data_ptr(), array("q", ordered).tobytes(), 8 * self.count)
        self._addresses.copy_(staging, non_blocking=True)


def _raw_stream(device: Any) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))
