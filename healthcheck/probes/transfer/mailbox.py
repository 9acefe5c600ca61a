"""From the device to the host without waiting: implements :class:`healthcheck.protocols.Mailbox`.

Values on the host are read at once. Values on a CUDA or ROCm device are packed into one vector per
step and device, copied to pinned memory on the stream that made them, and read when the copy's
event says that it is done: one or two steps late, and never with a wait on the step path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from healthcheck.probes.transfer.devices import READ_EVERY
from healthcheck.probes.transfer.late import Element, Late, LateTable
from healthcheck.probes.transfer.letters import DeviceCopy, Parcel, PinnedMemory
from healthcheck.probes.values import is_tensor, on_host, scalar
from healthcheck.samples import Sample

MAX_IN_FLIGHT = 128
"""Posts under way at most. A host that runs further ahead of its device than that (a loop that
replays CUDA graphs) gives up the device values of a step rather than wait, and counts them:
:attr:`StepMailbox.dropped`."""


class HostMailbox:
    """Reads at once: for the CPU, and for backends that have no mailbox of their own.

    There a value that is on a device is read in one step of :data:`READ_EVERY`. Those of the last step are
    kept and read, too, when everything is asked for: before a checkpoint, at the end, or by a gate that waits.
    """

    def __init__(self) -> None:
        self._arrived: list[Sample] = []
        self._unread: list[Sample] = []
        self._step = 0

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        if step != self._step:
            self._step, self._unread = step, []
        for sample in samples:
            if type(sample.value) is float:
                self._arrived.append(sample)
            elif sample.step % READ_EVERY and waits(sample.value):
                self._unread.append(sample)
            elif read_now(sample):
                self._arrived.append(sample)

    def ready(self) -> list[Sample]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[Sample]:
        unread, self._unread = self._unread, []
        self._arrived += [sample for sample in unread if read_now(sample)]
        return self.ready()


class _Letter:
    """The samples of one ``post``, and where their device values will appear."""

    __slots__ = ("copies", "late", "samples", "step")

    def __init__(self, step: int, samples: list[Sample], late: list[Sample], copies: list[DeviceCopy]) -> None:
        self.step = step
        self.samples = samples
        places = {key: (copy.page, index) for copy in copies for key, index in copy.order.items()}
        self.late = [(sample, *_recipe(sample.value, places)) for sample in late]
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
        parcels: dict[int, Parcel] = {}
        told: Any = None
        for sample in samples:
            value = sample.value
            kind = type(value)
            if kind is float:
                kept.append(sample)
            elif kind is Element and value.table.tensor is not None:
                _add_table(parcels, value.table)
                late.append(sample)
                kept.append(sample)
            elif kind is Late:
                for part in value.parts:
                    if isinstance(part, Element):
                        _add_table(parcels, part.table)
                    elif isinstance(part, LateTable):
                        _add_table(parcels, part)
                    elif is_tensor(part) and part.is_cuda:
                        _parcel(parcels, part.get_device()).add_scalar(part)
                late.append(sample)
                kept.append(sample)
            elif is_tensor(value) and value.is_cuda:
                _parcel(parcels, value.get_device()).add_scalar(value)
                late.append(sample)
                kept.append(sample)
            elif read_now(sample):
                kept.append(sample)
            if sample.detail is not told:
                told = sample.detail
                for table in getattr(told, "tables", ()):
                    _add_table(parcels, table)
        if parcels and self._under_way() >= self.max_in_flight:
            self.dropped += len(late)
            gone = set(map(id, late))
            kept, late, parcels = [s for s in kept if id(s) not in gone], [], {}
        copies = [self._memory.send(device, parcel) for device, parcel in parcels.items()]
        if kept:
            self._letters.append(_Letter(step, kept, late, copies))

    def ready(self) -> list[Sample]:
        letters = self._letters
        arrived: list[Sample] = []
        while letters and letters[0].done():
            arrived += self._open(letters.popleft())
        return arrived

    def drain(self) -> list[Sample]:
        for letter in self._letters:
            for copy in letter.copies:
                copy.event.synchronize()
        return self.ready()

    @property
    def oldest(self) -> int | None:
        """Step of the oldest letter under way, None without any."""
        return self._letters[0].step if self._letters else None

    def _under_way(self) -> int:
        if len(self._letters) < self.max_in_flight:
            return 0
        return sum(1 for letter in self._letters if letter.copies)

    def _open(self, letter: _Letter) -> list[Sample]:
        for copy in letter.copies:
            self._memory.receive(copy)
        for sample, compute, parts in letter.late:
            sample.value = _number(parts[0]) if compute is None else float(compute(*map(_number, parts)))
        return letter.samples


def _parcel(parcels: dict[int, Parcel], device: int) -> Parcel:
    parcel = parcels.get(device)
    if parcel is None:
        parcel = parcels[device] = Parcel()
    return parcel


def _add_table(parcels: dict[int, Parcel], table: LateTable) -> None:
    if table.tensor is not None and table.tensor.is_cuda:
        _parcel(parcels, table.tensor.get_device()).add_table(table)


class StepMailbox:
    """Starts as a host mailbox and takes on a device once the first device value is posted."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._max_in_flight = max_in_flight
        self._become(HostMailbox())

    def _become(self, box: HostMailbox | DeviceMailbox) -> None:
        self._box = box
        self.ready: Callable[[], list[Sample]] = box.ready
        self.drain: Callable[[], list[Sample]] = box.drain

    @property
    def dropped(self) -> int:
        return getattr(self._box, "dropped", 0)

    @property
    def oldest(self) -> int | None:
        """Step of the oldest letter that waits for a device, None without any."""
        return getattr(self._box, "oldest", None)

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        if type(self._box) is HostMailbox:
            for sample in samples:
                if type(sample.value) is not float and _on_cuda(sample.value):
                    waiting = self._box.ready()
                    self._become(DeviceMailbox(self._max_in_flight))
                    self._box.post(step, waiting)
                    break
        self._box.post(step, samples)


def read_now(sample: Sample) -> bool:
    """Turn the value of a sample into a number; False if it is none."""
    value = sample.value
    if isinstance(value, float):
        return True
    if isinstance(value, Element):
        sample.value = value.table.number(value.position)
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


def waits(value: Any) -> bool:
    """Whether reading a value would wait for a device."""
    if isinstance(value, Late):
        return any(map(waits, value.parts))
    if isinstance(value, Element):
        value = value.table
    if isinstance(value, LateTable):
        value = value.tensor
    return is_tensor(value) and not on_host(value)


def _recipe(value: Any, places: Mapping[int, tuple[Any, int]]) -> tuple[Any, list[Any]]:
    """``(compute, parts)`` of a late value. A part is an element of a table, a place on a page, or a float.

    :param places: where each scalar will appear, by its id.
    """
    if isinstance(value, Late):
        return value.compute, [_part(part, places) for part in value.parts]
    return None, [_part(value, places)]


def _part(part: Any, places: Mapping[int, tuple[Any, int]]) -> Any:
    if isinstance(part, (Element, LateTable)):
        return part
    return places[id(part)] if is_tensor(part) and part.is_cuda else float(part)


def _number(part: Any) -> Any:
    """A part of a late value, once its copy is done; all numbers of a table."""
    if isinstance(part, LateTable):
        return part.numbers()
    if isinstance(part, Element):
        return part.table.number(part.position)
    if isinstance(part, tuple):
        return float(part[0][part[1]])
    return float(part)


def _on_cuda(value: Any) -> bool:
    if isinstance(value, Late):
        return any(map(_on_cuda, value.parts))
    if isinstance(value, Element):
        value = value.table
    if isinstance(value, LateTable):
        value = value.tensor
    return bool(is_tensor(value) and value.is_cuda)
