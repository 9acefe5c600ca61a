"""Memory after each step: of the device, of the process, and what is left."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.memory import host
from healthcheck.probes.memory.device import TorchDevice
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

FLOOR_STEPS = 100
"""Length of a stretch for ``memory.epoch_floor`` where the trainer knows no epochs."""

_READ = tuple(f"memory.{name}" for name in ("allocated", "reserved", "peak", "fraction", "fragmentation", "retries"))


class MemoryProbe:
    """Reads the allocator's counters once per step, after the update, when activations are gone.

    Without an accelerator the process itself is the device: ``memory.allocated``, ``peak`` and
    ``fraction`` are its resident memory, against the cgroup limit or the memory of the machine.
    """

    name = "memory"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.EPOCH_START, EventKind.EPOCH_END)
    provides: tuple[Metric, ...] = (
        Metric("memory.allocated", "Memory held by live tensors after the step.", "bytes", Cost.HOST),
        Metric("memory.reserved", "Memory taken from the driver, cache included.", "bytes", Cost.HOST, needs=("cuda",)),
        Metric("memory.peak", "Highest allocation so far.", "bytes", Cost.HOST),
        Metric("memory.fraction", "Reserved (on CPU: resident) memory against capacity.", "fraction", Cost.HOST),
        Metric("memory.fragmentation", "(reserved - allocated) / reserved.", "fraction", Cost.HOST, needs=("cuda",)),
        Metric("memory.retries", "Allocations that needed the cache emptied first.", cost=Cost.HOST, needs=("cuda",)),
        Metric(
            "memory.epoch_floor",
            f"Lowest allocation of an epoch (of {FLOOR_STEPS} steps where there are no epochs).",
            "bytes",
            Cost.HOST,
        ),
    )

    def __init__(self, device: TorchDevice | None = None) -> None:
        self.device = device or TorchDevice()
        self._floor: int | None = None
        self._steps = 0
        self._knows_epochs = False
        self.only_when_due: tuple[EventKind, ...] = ()

    def plan(self, demand: Demand) -> None:
        # The floor of an epoch is the lowest of all its steps.
        self.only_when_due = () if demand.wants("memory.epoch_floor") else (EventKind.STEP_END,)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.EPOCH_START:
            self._knows_epochs = True
            self._floor, self._steps = None, 0
            return ()
        if event.kind is EventKind.EPOCH_END:
            self._knows_epochs = True
            return self._take_floor(event)
        if not demand.wants("memory.epoch_floor") and not any(demand.due(key, event.step) for key in _READ):
            return ()
        stats = self.device.statistics()
        samples = [
            Sample(f"memory.{name}", event.step, float(stats[name]))
            for name in ("allocated", "reserved", "peak", "retries")
            if name in stats
        ]
        allocated, reserved = stats.get("allocated"), stats.get("reserved")
        held = reserved if reserved is not None else allocated
        capacity = self.device.capacity_bytes()
        if held is not None and capacity:
            samples.append(Sample("memory.fraction", event.step, held / capacity))
        if reserved and allocated is not None:
            samples.append(Sample("memory.fragmentation", event.step, (reserved - allocated) / reserved))
        if allocated is not None:
            self._floor = allocated if self._floor is None else min(self._floor, allocated)
            self._steps += 1
            if not self._knows_epochs and self._steps >= FLOOR_STEPS:
                samples += self._take_floor(event)
        return samples

    def _take_floor(self, event: Event) -> list[Sample]:
        floor, self._floor, self._steps = self._floor, None, 0
        return [] if floor is None else [Sample("memory.epoch_floor", event.step, float(floor))]


class HostMemoryProbe:
    """Resident memory of this process. Loader workers and other children are not counted."""

    name = "host-memory"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("memory.host", "Resident memory of this process, without its children.", "bytes", Cost.HOST),
        Metric("host.open_files", "File descriptors that this process holds open.", cost=Cost.HOST, needs=("linux",)),
        Metric("memory.host_fraction", "The same as a part of the cgroup limit or the machine.", "fraction", Cost.HOST),
    )

    def __init__(
        self, resident: Callable[[], int | None] | None = None, limit: Callable[[], int | None] | None = None
    ) -> None:
        self._resident = resident or host.resident_bytes
        self._ask_limit = limit or host.memory_limit_bytes
        self._limit: int | None = None
        self._asked = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not any(demand.due(metric.key, event.step) for metric in self.provides):
            return ()
        used = self._resident()
        if used is None:
            return ()
        samples = [Sample("memory.host", event.step, float(used))]
        if demand.wants("memory.host_fraction"):
            if not self._asked:
                self._limit, self._asked = self._ask_limit(), True
            if self._limit:
                samples.append(Sample("memory.host_fraction", event.step, used / self._limit))
        if demand.due("host.open_files", event.step):
            count = host.open_files()
            if count is not None:
                samples.append(Sample("host.open_files", event.step, float(count)))
        return samples


class LiveTensorProbe:
    """Counts tensors that Python still holds. Walks the whole heap: tens of milliseconds.

    Only where a rule asks for it; give that rule an ``every`` of hundreds of steps.
    """

    name = "live-tensors"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("memory.live_tensors", "Tensors that Python objects still hold.", cost=Cost.HOST),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        torch = sys.modules.get("torch")
        if torch is None or not demand.due("memory.live_tensors", event.step):
            return ()
        kinds: dict[type[Any], bool] = {}
        count = 0
        for thing in gc.get_objects():
            kind = type(thing)  # isinstance() would ask lazy proxies for their __class__
            known = kinds.get(kind)
            if known is None:
                known = kinds[kind] = issubclass(kind, torch.Tensor)
            count += known
        return (Sample("memory.live_tensors", event.step, float(count)),)
