"""From the device to the host without waiting: implements :class:`healthcheck.protocols.Mailbox`.

Values on the host are read at once. Values on a CUDA or ROCm device are packed into one vector per
step and device, copied to pinned memory on the stream that made them, and read when the copy's
event says that it is done: one or two steps late, and never with a wait on the step path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.probes.values import is_tensor, on_host, scalar
from healthcheck.samples import Sample

MAX_IN_FLIGHT = 8
"""Posts under way at most. A host that runs further ahead of its device than that gives up the
device values of a step rather than wait, and counts them: :attr:`StepMailbox.dropped`."""


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


@dataclass(slots=True)
class _Letter:
    """The samples of one ``post``, and where their device values will appear."""

    samples: list[Sample]
    copies: list[_Copy] = field(default_factory=list)

    def done(self) -> bool:
        return all(copy.event.query() for copy in self.copies)


@dataclass(slots=True)
class _Copy:
    """One packed vector of one device on its way to pinned memory."""

    positions: list[int]
    buffer: Any
    event: Any
    packed: Any
    """Kept until the copy is done, so that its memory is not handed to somebody else."""


class DeviceMailbox:
    """Packed, asynchronous, bounded. Letters arrive in the order in which they were posted."""

    def __init__(self, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self.max_in_flight = max_in_flight
        self.dropped = 0
        """Samples given up because more than ``max_in_flight`` posts were under way."""
        self._letters: deque[_Letter] = deque()
        self._free: dict[int, list[Any]] = {}

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        kept: list[Sample] = []
        by_device: dict[Any, list[int]] = {}
        for sample in samples:
            if on_host(sample.value):
                if read_now(sample):
                    kept.append(sample)
            elif sample.value.device.type == "cuda":
                by_device.setdefault(sample.value.device, []).append(len(kept))
                kept.append(sample)
            elif read_now(sample):
                kept.append(sample)
        letter = _Letter(kept)
        if by_device and self._under_way() >= self.max_in_flight:
            late = {i for positions in by_device.values() for i in positions}
            self.dropped += len(late)
            letter.samples = [s for i, s in enumerate(kept) if i not in late]
            by_device = {}
        for device, positions in by_device.items():
            letter.copies.append(self._send(device, positions, [kept[i].value for i in positions]))
        if letter.samples:
            self._letters.append(letter)

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

    def _send(self, device: Any, positions: list[int], values: list[Any]) -> _Copy:
        import torch

        by_type: dict[Any, list[int]] = {}
        for index, value in enumerate(values):
            by_type.setdefault(value.dtype, []).append(index)
        with torch.cuda.device(device):
            # One stack per type, since converting each scalar on its own would be a kernel each.
            parts = [
                torch.stack([values[i].detach().reshape(()) for i in members]).to(torch.float64)
                for members in by_type.values()
            ]
            packed = parts[0] if len(parts) == 1 else torch.cat(parts)
            size = 1 << (len(values) - 1).bit_length()
            spare = self._free.get(size)
            buffer = spare.pop() if spare else torch.empty(size, dtype=torch.float64, pin_memory=True)
            buffer[: len(values)].copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        order = [positions[i] for members in by_type.values() for i in members]
        return _Copy(order, buffer, event, packed)

    def _open(self, letter: _Letter) -> list[Sample]:
        for copy in letter.copies:
            numbers = copy.buffer[: len(copy.positions)].tolist()
            for position, number in zip(copy.positions, numbers, strict=True):
                letter.samples[position].value = number
            self._free.setdefault(copy.buffer.numel(), []).append(copy.buffer)
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
    if is_tensor(value) and not on_host(value):
        sample.value = float(value)
        return True
    number = scalar(value)
    if number is None:
        return False
    sample.value = number
    return True


def _on_cuda(value: Any) -> bool:
    return is_tensor(value) and value.device.type == "cuda"
