"""From the device to the host without waiting: implements :class:`healthcheck.run.judge.Mailbox`.

Numbers that the host knows are handed on as they come. What a kernel of ours has written to pinned memory itself is read
once its mark stands there. Other numbers of a CUDA or ROCm device are packed into one vector per step and device, copied to
pinned memory on the stream that made them, and read when the copy's event says that it is done: one or two steps late, and
never with a wait on the step path. On other devices every read is a wait; there one step in :data:`READ_EVERY` is read.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Sample, arrived
from healthcheck.device import shortcuts, tensors
from healthcheck.device.deferred import SLOTS, Deferred, DeviceScalar, DeviceVector, Slots, number
from healthcheck.device.pages import Page

READ_EVERY = 10
"""Steps between two reads on devices where every read is a wait."""
MAX_IN_FLIGHT = 128
"""Posts under way at most. A host that runs further ahead of its device than that (a loop that
replays CUDA graphs) gives up the device values of a step rather than wait, and counts them:
:attr:`StepMailbox.dropped`."""

_EVENT = operator.attrgetter("event")
_IS_DONE = operator.methodcaller("query")
_IS_HERE = operator.attrgetter("here")
_FEW = 4
"""Up to so many scalars are written one by one; more are stacked by type first."""


class StepMailbox:
    """The samples of a run on their way from the probes to the engine, in the order in which they were posted.

    :param memory: sends transfers; another one in tests.
    """

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT, memory: PinnedMemory | None = None) -> None:
        self.max_in_flight = max_in_flight
        self.dropped = 0
        """Samples given up because more than ``max_in_flight`` posts were under way."""
        self.oldest: int | None = None
        """The oldest step of which something is still on a device: a post, or one of the rows asked about last. None without any."""
        self._arrived: list[Sample] = []
        self._under_way: deque[_Post] = deque()
        self._unread: list[Sample] = []
        """Of the last step, on a device where reading waits. Read when everything is asked for."""
        self._unread_step = 0
        self._memory = memory or PinnedMemory()
        self._held: list[Deferred | DeviceVector] = []
        """Of a row: sent with the samples of its step, so that each step makes one copy."""
        self._held_step = 0

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        if not self._under_way and not self._held:
            for sample in samples:
                if type(sample.value) is not float:
                    break
            else:  # nearly always so on a CPU
                self._arrived += samples
                return
        self._sort_out(step, samples)

    def hold(self, step: int, numbers: Sequence[Deferred | DeviceVector]) -> None:
        self._held += numbers
        self._held_step = step
        if self.oldest is None:
            self.oldest = step

    def send(self) -> bool:
        if self._held:
            self._sort_out(self._held_step, ())
        return bool(self._held)

    def receive(self, rows: Sequence[StepRow]) -> int | None:
        if self._under_way:
            self._open_arrived()
        first = self._under_way[0].step if self._under_way else self._held_step if self._held else None
        for row in rows:
            if first is not None and first <= row.step:
                break  # nothing overtakes what was sent for before
            vector = row.numbers
            if vector is None:
                continue
            floats = vector.floats
            if floats is None:
                # As `DeviceVector.has_landed` does, at one call less in every step.
                page = vector.own_page
                if page.mark.value != vector.mark:
                    first = row.step
                    break
                floats = vector.floats = page.numbers[:]
                vector.own_page = vector.tensor = vector._fetch = None
            row.numbers = None
            loss, norm = row.loss, row.grad_norm
            if type(loss) is DeviceScalar and loss.vector is vector:
                row.loss = floats[loss.position]
            if type(norm) is DeviceScalar and norm.vector is vector:
                row.grad_norm = floats[norm.position]
            if row.held_back:
                row.arrived()
        self.oldest = first
        return first

    def ready(self) -> list[Sample]:
        if self._under_way:
            self._open_arrived()
        given_out, self._arrived = self._arrived, []
        return given_out

    def drain(self) -> list[Sample]:
        self.send()
        for post in self._under_way:
            for transfer in post.transfers:
                transfer.event.synchronize()
            for vector in post.written:
                vector.numbers()
        unread, self._unread = self._unread, []
        if unread:
            self._arrived += arrived(unread)
        given_out = self.ready()
        self.oldest = None
        return given_out

    def _sort_out(self, step: int, samples: Sequence[Sample]) -> None:
        """What is known goes on, what is on a device is sent for."""
        if step != self._unread_step:
            self._unread_step, self._unread = step, []
        kept: list[Sample] = []
        late: list[Sample] = []
        asked = _Asked()
        held, self._held = self._held, []
        for given in held:
            asked.add(given.leaves())
        for sample in samples:
            value = sample.value
            if type(value) is not float:
                if not isinstance(value, Deferred):
                    value = sample.value = number(value)
                    if value is None:
                        continue
                if isinstance(value, Deferred):
                    if not asked.add(value.leaves()) and sample.step % READ_EVERY:
                        self._unread.append(sample)
                        continue
                    late.append(sample)
            kept.append(sample)
        transfers, written = list(asked.transfers.values()), asked.written
        # Rather less data than a wait: the host has run far ahead of its device.
        if (transfers or written) and not held and self._too_many():
            self.dropped += len(late)
            gone = set(map(id, late))
            kept, late, transfers, written = [s for s in kept if id(s) not in gone], [], [], []
        for transfer in transfers:
            self._memory.send(transfer)
        # Nothing is late, so nothing needs to queue.
        if not transfers and not written and not self._under_way:
            self._arrived += arrived(kept)
        elif kept or transfers or written:
            self._under_way.append(_Post(step, kept, late, transfers, written))
            self.oldest = self._under_way[0].step

    def _too_many(self) -> bool:
        """Posts without a device value wait only for those before them, and do not count."""
        if len(self._under_way) < self.max_in_flight:
            return False
        return sum(1 for post in self._under_way if post.transfers or post.written) >= self.max_in_flight

    def _open_arrived(self) -> None:
        under_way = self._under_way
        while under_way and all(map(_IS_DONE, map(_EVENT, under_way[0].transfers))):
            if not all(map(_IS_HERE, under_way[0].written)):
                break
            post = under_way.popleft()
            for transfer in post.transfers:
                self._memory.receive(transfer)
            self._arrived += arrived(post.samples) if post.late else post.samples
        self.oldest = under_way[0].step if under_way else self._held_step if self._held else None


class _Post:
    """The samples of one call of ``post``, and what they wait for: transfers, and vectors that a device writes itself."""

    __slots__ = ("late", "samples", "step", "transfers", "written")

    def __init__(
        self,
        step: int,
        samples: list[Sample],
        late: list[Sample],
        transfers: list[Transfer],
        written: list[DeviceVector],
    ) -> None:
        self.step = step
        self.samples = samples
        self.late = bool(late)
        self.transfers = transfers
        self.written = written


class _Asked:
    """What one post asks devices for."""

    __slots__ = ("_answers", "transfers", "written")

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        """By device."""
        self.written: list[DeviceVector] = []
        """Vectors that their device writes to the host itself."""
        self._answers: dict[int, bool] = {}
        """For leaves by their id: many samples are made of a few."""

    def add(self, leaves: Iterable[DeviceScalar | DeviceVector]) -> bool:
        """Note what has to come; False if some of it would have to be read with a wait."""
        for leaf in leaves:
            sends = self._answers.get(id(leaf))
            if sends is None:
                tensor = leaf.tensor
                if type(leaf) is DeviceVector and leaf.own_page is not None:
                    sends = True
                    self.written.append(leaf)
                else:
                    sends = tensor is None or tensor.device.type in tensors.PINNED
                    if sends and tensor is not None:  # else it was sent before
                        device = tensor.get_device()
                        transfer = self.transfers.get(device)
                        if transfer is None:
                            transfer = self.transfers[device] = Transfer(device)
                        transfer.add(leaf)
                self._answers[id(leaf)] = sends
            if not sends:
                return False
        return True


class Transfer:
    """What one post sends from one device to the host: scalars, and vectors as a whole. Each only once.

    No device memory is kept: what was freed is used again in the order of its stream, after the copy.
    """

    __slots__ = ("_places", "_scalars", "_vectors", "device", "event", "page", "tensors", "vectors")

    def __init__(self, device: int) -> None:
        self.device = device
        self.tensors: list[Any] = []
        """Scalars, each in its place."""
        self.vectors: list[DeviceVector] = []
        self._places: dict[int, int] = {}
        self._scalars: list[tuple[DeviceScalar, int]] = []
        self._vectors: list[tuple[DeviceVector, Any, int]] = []
        self.page: Any = None
        self.event: Any = None

    def add(self, leaf: DeviceScalar | DeviceVector) -> None:
        if isinstance(leaf, DeviceScalar):
            place = self._places.setdefault(id(leaf.tensor), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(leaf.tensor)
            self._scalars.append((leaf, place))
        elif id(leaf) not in self._places:
            self._places[id(leaf)] = -1
            self.vectors.append(leaf)

    def sent(self, page: Any, begin: int, event: Any) -> None:
        """The copy to ``page`` is under way, scalars first and vectors from ``begin`` on; ``event`` comes behind it."""
        self.page, self.event = page, event
        for leaf, place in self._scalars:
            leaf.sent(page, place, self.wait)
        for vector in self.vectors:
            self._vectors.append((vector, page, begin))
            begin += vector.size
        for vector, _, _ in self._vectors:
            vector.sent(self.wait)
        self.tensors, self.vectors = [], []

    def wait(self) -> None:
        """Have the numbers, even if that takes a wait."""
        self.event.synchronize()
        self.arrived()

    def arrived(self) -> None:
        """The copy is done. Scalars stay on their page: only those that are asked for are read."""
        scalars, self._scalars = self._scalars, []
        for leaf, _ in scalars:
            leaf.arrived()
        vectors, self._vectors = self._vectors, []
        for vector, page, begin in vectors:
            vector.arrived(getattr(page, "numbers", page), begin)


class PinnedMemory:
    """Sends transfers by one copy each, and uses pages and events again."""

    def __init__(self) -> None:
        self._pages: dict[int, list[tuple[Any, Any, int]]] = {}
        self._events: dict[int, list[Any]] = {}
        self._streams: dict[int, tuple[int, Any]] = {}
        self._slots: dict[int, Slots] = {}

    def send(self, transfer: Transfer) -> None:
        """Start the copy, on the stream that is current on the transfer's device."""
        import torch

        device = transfer.device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.send(transfer)
            return
        raw = torch._C._cuda_getCurrentRawStream(device)
        known = self._streams.get(device)
        if known is None or known[0] != raw:
            stream = torch.cuda.current_stream(device)
            if known is not None:
                stream.wait_stream(known[1])  # values of a step may have been made on the stream that was left
            known = self._streams[device] = (raw, stream)
        begin, page = self._copy(torch, raw, transfer)
        events = self._events.setdefault(device, [])
        event = events.pop() if events else torch.cuda.Event()
        event.record(known[1])
        transfer.sent(page, begin, event)

    def _copy(self, torch: Any, stream: int, transfer: Transfer) -> tuple[int, Any]:
        """Where vectors begin on the page that everything is copied to."""
        slots = self._own_slots(torch, transfer.device)
        if not transfer.vectors:
            # The plain way is below; the driver's copy saves most of its host time.
            direct = shortcuts.driver_copies()
            if direct is not None:
                sent = direct.send(stream, transfer.tensors, slots)
                if sent is not None:
                    return len(transfer.tensors), sent
        packed, begin = _packed(transfer, slots)
        count = packed.numel()
        page = Page(self._pages.setdefault(count, []), count)
        page.tensor.copy_(packed, non_blocking=True)
        return begin, page

    def _own_slots(self, torch: Any, device: int) -> Slots:
        """Where scalars without a vector are put side by side: of this mailbox alone, whose copies follow each other."""
        slots = self._slots.get(device)
        if slots is None:
            with torch.inference_mode(False):
                vector = torch.zeros(SLOTS, dtype=torch.float64, device=torch.device("cuda", device))
            slots = self._slots[device] = Slots(vector, SLOTS)
        return slots

    def receive(self, transfer: Transfer) -> None:
        """The copy is done; its event is free."""
        transfer.arrived()
        self._events[transfer.device].append(transfer.event)


def _packed(transfer: Transfer, own: Slots) -> tuple[Any, int]:
    """A float64 vector on the device, scalars first, and where the transfer's vectors begin in it.

    :param own: slots for scalars without a vector.
    """
    scalars, vectors = transfer.tensors, transfer.vectors
    if len(vectors) <= 1 and len(scalars) <= SLOTS:
        slots = vectors[0].slots if vectors else own
        if slots is not None:
            _write(scalars, slots)
            return slots.whole, slots.count
    # Several vectors, or more scalars than there are slots: a vector made for the occasion.
    import torch

    parts = [vector.tensor.detach().reshape(-1) for vector in vectors if vector.tensor is not None]
    if scalars:
        first = torch.empty(len(scalars), dtype=torch.float64, device=scalars[0].device)
        _write(scalars, Slots(first, len(scalars)))
        parts.insert(0, first)
    return torch.cat([part.to(torch.float64) for part in parts]) if len(parts) > 1 else parts[0], len(scalars)


def _write(scalars: list[Any], slots: Slots) -> None:
    """Scalars to the first slots.

    Those of different types are stacked type by type: converting each on its own would be a kernel
    each, and converting them together could round an int64.
    """
    if len(scalars) <= _FEW:
        for slot, value in zip(slots.first(len(scalars)), scalars, strict=True):
            slot.copy_(value.detach().reshape(()) if value.dim() else value.detach())
        return
    import torch

    by_type: dict[Any, list[int]] = {}
    for index, value in enumerate(scalars):
        by_type.setdefault(value.dtype, []).append(index)
    for members in by_type.values():
        stacked = torch.stack([scalars[i].detach().reshape(()) for i in members])
        if members[-1] - members[0] == len(members) - 1:
            slots.whole[members[0] : members[-1] + 1].copy_(stacked)
        else:
            for i, value in zip(members, stacked.unbind(), strict=True):
                slots.whole[i].copy_(value)
