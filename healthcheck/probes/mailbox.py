"""From the device to the host without waiting: implements :class:`healthcheck.protocols.Mailbox`.

Values on the host are read at once. Values on a CUDA or ROCm device are packed into one vector per
step and device, copied to pinned memory on the stream that made them, and read when the copy's
event says that it is done: one or two steps late, and never with a wait on the step path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from healthcheck.probes.late import Element, Late, LateTable
from healthcheck.probes.letters import DeviceCopy, Parcel, PinnedMemory
from healthcheck.probes.values import is_tensor, on_host, scalar
from healthcheck.samples import Sample

MAX_IN_FLIGHT = 128
"""Posts under way at most. A host that runs further ahead of its device than that (a loop that
replays CUDA graphs) gives up the device values of a step rather than wait, and counts them:
:attr:`StepMailbox.dropped`."""


class HostMailbox:
    """Reads at once: for the CPU, for backends that wait at every read anyhow, and for tests."""

    def __init__(self) -> None:
        self._arrived: list[Sample] = []

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if read_now(sample):
                self._arrived.append(sample)

    def ready(self) -> list[Sample]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[Sample]:
        return self.ready()


class _Letter:
    """The samples of one ``post``, and where their device values will appear."""

    __slots__ = ("copies", "late", "samples")

    def __init__(self, samples: list[Sample], late: list[Sample], copies: list[DeviceCopy]) -> None:
        self.samples = samples
        self.late = [(sample, *_recipe(sample.value)) for sample in late]
        """Those whose value is not a number yet: with what makes it, and of what."""
        for sample in late:
            sample.value = None  # lets go of device memory
        self.copies = copies

    def done(self) -> bool:
        return all(copy.event.query() for copy in self.copies)


class DeviceMailbox:
    """Packed, asynchronous, bounded. Letters arrive in the order in which they were posted."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self.max_in_flight = max_in_flight
        self.dropped = 0
        """Samples given up because more than ``max_in_flight`` posts were under way."""
        self._letters: deque[_Letter] = deque()
        self._memory = PinnedMemory()

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        kept: list[Sample] = []
        late: list[Sample] = []
        parcels: dict[Any, Parcel] = {}
        told: Any = None
        for sample in samples:
            value = sample.value
            kind = type(value)
            if kind is float:
                kept.append(sample)
            elif kind is Element and value.table.tensor is not None:
                self._parcel(parcels, value.table.tensor.device).add_table(value.table)
                late.append(sample)
                kept.append(sample)
            elif kind is Late:
                for part in value.parts:
                    self._add_part(parcels, part)
                late.append(sample)
                kept.append(sample)
            elif is_tensor(value) and value.device.type == "cuda":
                self._parcel(parcels, value.device).add_scalar(value)
                late.append(sample)
                kept.append(sample)
            elif read_now(sample):
                kept.append(sample)
            if sample.detail is not told:
                told = sample.detail
                for table in getattr(told, "tables", ()):
                    if table.tensor is not None and table.tensor.device.type == "cuda":
                        self._parcel(parcels, table.tensor.device).add_table(table)
        if parcels and self._under_way() >= self.max_in_flight:
            self.dropped += len(late)
            gone = set(map(id, late))
            kept, late, parcels = [s for s in kept if id(s) not in gone], [], {}
        copies = [self._memory.send(device, parcel) for device, parcel in parcels.items()]
        if kept:
            self._letters.append(_Letter(kept, late, copies))

    def ready(self) -> list[Sample]:
        arrived: list[Sample] = []
        while self._letters and self._letters[0].done():
            arrived += self._open(self._letters.popleft())
        return arrived

    def drain(self) -> list[Sample]:
        for letter in self._letters:
            for copy in letter.copies:
                copy.event.synchronize()
        return self.ready()

    def _under_way(self) -> int:
        return sum(1 for letter in self._letters if letter.copies)

    @staticmethod
    def _parcel(parcels: dict[Any, Parcel], device: Any) -> Parcel:
        parcel = parcels.get(device)
        if parcel is None:
            parcel = parcels[device] = Parcel()
        return parcel

    def _add_part(self, parcels: dict[Any, Parcel], part: Any) -> None:
        if isinstance(part, Element):
            table: LateTable = part.table
            if table.tensor is not None and table.tensor.device.type == "cuda":
                self._parcel(parcels, table.tensor.device).add_table(table)
        elif is_tensor(part) and part.device.type == "cuda":
            self._parcel(parcels, part.device).add_scalar(part)

    def _open(self, letter: _Letter) -> list[Sample]:
        numbers: dict[int, float] = {}
        for copy in letter.copies:
            numbers |= self._memory.receive(copy)
        for sample, compute, parts in letter.late:
            found = [
                float(part.table.numbers()[part.position])
                if isinstance(part, Element)
                else numbers[part]
                if isinstance(part, int)
                else part
                for part in parts
            ]
            sample.value = found[0] if compute is None else float(compute(*found))
        return letter.samples


class StepMailbox:
    """Starts as a host mailbox and takes on a device once the first device value is posted."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._box: HostMailbox | DeviceMailbox = HostMailbox()
        self._max_in_flight = max_in_flight

    @property
    def dropped(self) -> int:
        return getattr(self._box, "dropped", 0)

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        if isinstance(self._box, HostMailbox) and any(_on_cuda(s.value) for s in samples):
            waiting = self._box.ready()
            self._box = DeviceMailbox(self._max_in_flight)
            self._box.post(step, waiting)
        self._box.post(step, samples)

    def ready(self) -> list[Sample]:
        return self._box.ready()

    def drain(self) -> list[Sample]:
        return self._box.drain()


def read_now(sample: Sample) -> bool:
    """Turn the value of a sample into a number; False if it is none."""
    value = sample.value
    if isinstance(value, float):
        return True
    if isinstance(value, Element):
        sample.value = value.table.numbers()[value.position]
        return True
    if isinstance(value, Late):
        sample.value = value.read()
        return True
    if is_tensor(value) and not on_host(value):
        sample.value = float(value)
        return True
    number = scalar(value)
    if number is None:
        return False
    sample.value = number
    return True


def _recipe(value: Any) -> tuple[Any, list[Any]]:
    """``(compute, parts)`` of a late value; a scalar that is under way is known by its key."""
    if isinstance(value, Late):
        return value.compute, [_part(part) for part in value.parts]
    return None, [_part(value)]


def _part(part: Any) -> Any:
    """An element of a table, a float, or the key of a scalar in its parcel."""
    if isinstance(part, Element):
        return part
    return id(part) if is_tensor(part) and part.device.type == "cuda" else float(part)


def _on_cuda(value: Any) -> bool:
    if isinstance(value, Late):
        return any(map(_on_cuda, value.parts))
    if isinstance(value, Element):
        value = value.table.tensor
    return is_tensor(value) and value.device.type == "cuda"
