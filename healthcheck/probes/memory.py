"""Memory of device and process: after each step, at the points of the loop, per epoch, how long it lasts, and graphs of
past steps that something still holds."""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.core.text import size_text
from healthcheck.probes.looks import CloserLooks, next_look
from healthcheck.probes.memory_readings import (
    TorchDevice,
    cgroup_memory,
    limited_cgroups,
    memory_limit_bytes,
    open_files,
    resident_bytes,
)
from healthcheck.rulelang.rule import SETTLED as RUN_SETTLED

FLOOR_STEPS = 100
"""Length of a stretch for ``memory.epoch_floor`` where the trainer knows no epochs."""

ROOMY = 0.8
"""Part of what there is below which memory is far from being full."""
GREW = 1.001
"""Times its highest value so far from which on memory has grown: pages come and go."""

_READ = tuple(f"memory.{name}" for name in ("allocated", "reserved", "peak", "fraction", "fragmentation", "retries"))


class MemoryProbe(CloserLooks):
    """Reads the allocator's counters after the update, when activations are gone; more often while they grow, or there is
    little room left.

    Without an accelerator the process itself is the device: ``memory.allocated``, ``peak`` and
    ``fraction`` are its resident memory, against the cgroup limit or the memory of the machine.
    """

    name = "memory"
    rests_always = True
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
        super().__init__()
        self.device = device or TorchDevice()
        self._floor: int | None = None
        self._steps = 0
        self._knows_epochs = False
        self._highest = self._retries = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.EPOCH_START:
            self._knows_epochs = True
            self._floor, self._steps = None, 0
            return ()
        if event.kind is EventKind.EPOCH_END:
            self._knows_epochs = True
            return self._take_floor(event)
        every = demand.wants("memory.epoch_floor")  # the lowest of all its steps
        if not every and not self.looks(event, demand, _READ):
            return ()
        stats = self.device.statistics()
        samples = [
            Sample(f"memory.{name}", event.step, float(stats[name]))
            for name in ("allocated", "reserved", "peak", "retries")
            if name in stats
        ]
        allocated, reserved = stats.get("allocated"), stats.get("reserved")
        # What is reserved is gone for others, used or not.
        held = reserved if reserved is not None else allocated
        capacity = self.device.capacity_bytes()
        if held is not None and capacity:
            samples.append(Sample("memory.fraction", event.step, held / capacity))
        if reserved and allocated is not None:
            samples.append(Sample("memory.fragmentation", event.step, (reserved - allocated) / reserved))
        retries, room = stats.get("retries", 0), not held or not capacity or held < ROOMY * capacity
        if not every:
            calm = room and (allocated or 0) <= GREW * self._highest and retries == self._retries
            self.rest(demand, _READ, calm=calm)
        self._highest, self._retries = max(self._highest, allocated or 0), retries
        if allocated is not None:
            self._floor = allocated if self._floor is None else min(self._floor, allocated)
            self._steps += 1
            if not self._knows_epochs and self._steps >= FLOOR_STEPS:
                samples += self._take_floor(event)
        return samples

    def _take_floor(self, event: Event) -> list[Sample]:
        floor, self._floor, self._steps = self._floor, None, 0
        return [] if floor is None else [Sample("memory.epoch_floor", event.step, float(floor))]


class HostMemoryProbe(CloserLooks):
    """Resident memory of this process. Loader workers and other children are not counted."""

    name = "host-memory"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("memory.host", "Resident memory of this process, without its children.", "bytes", Cost.HOST),
        Metric("host.open_files", "File descriptors that this process holds open.", cost=Cost.HOST, needs=("linux",)),
        Metric("memory.host_fraction", "The same as a part of the cgroup limit or the machine.", "fraction", Cost.HOST),
        Metric(
            "memory.cgroup_fraction",
            "Memory of all processes of the cgroup (of one with a limit), less cached files, as a part of its limit.",
            "fraction",
            Cost.HOST,
            needs=("a cgroup with a memory limit",),
        ),
    )

    _KEYS = tuple(metric.name for metric in provides)

    def __init__(
        self,
        resident: Callable[[], int | None] | None = None,
        limit: Callable[[], int | None] | None = None,
    ) -> None:
        super().__init__()
        self._groups: list[Any] | None = None
        self._resident = resident or resident_bytes
        self._ask_limit = limit or memory_limit_bytes
        self._limit: int | None = None
        self._asked = False
        self._highest: dict[str, float] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.looks(event, demand, self._KEYS):
            return ()
        used = self._resident()
        if used is None:
            self.rest_long(demand, self._KEYS)
            return ()
        samples = [Sample("memory.host", event.step, float(used))]
        if demand.wants("memory.host_fraction"):
            if not self._asked:
                self._limit, self._asked = self._ask_limit(), True
            if self._limit:
                samples.append(Sample("memory.host_fraction", event.step, used / self._limit))
        # A process stays in its groups.
        if (self._groups is None or self._groups) and self._asked_for("memory.cgroup_fraction", demand):
            if self._groups is None:
                self._groups = limited_cgroups()
            group = cgroup_memory(self._groups) if self._groups else None
            if group is not None:
                facts = {
                    "memory": f"{size_text(group[0])} of {size_text(group[1])}, this process {size_text(used)} of it"
                }
                samples.append(Sample("memory.cgroup_fraction", event.step, group[0] / group[1], detail=lambda: facts))
        if self._asked_for("host.open_files", demand):
            count = open_files()
            if count is not None:
                samples.append(Sample("host.open_files", event.step, float(count)))
        self.rest(demand, self._KEYS, calm=self._is_calm(samples))
        return samples

    def _asked_for(self, key: str, demand: Demand) -> bool:
        return demand.due(key, self._step) or (self._closer and demand.wants(key))

    def _is_calm(self, samples: Iterable[Sample]) -> bool:
        """Whether there is room, and neither memory nor the number of files is above its highest value so far."""
        calm = True
        for sample in samples:
            value, name = sample.value, sample.metric
            if name.endswith("fraction"):
                calm = calm and value < ROOMY
            elif value > (GREW if name == "memory.host" else 1) * self._highest.get(name, 0.0):
                calm, self._highest[name] = False, value
        return calm


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


EPOCH_METRICS = (
    "memory.epoch",
    "memory.epoch_start",
    "memory.epoch_end",
    "memory.epoch_peak",
    "memory.epoch_delta",
    "memory.epoch_cleanups",
    "memory.epoch_began",
    "memory.epoch_ended",
)


class MemoryEpochProbe:
    """One line of memory per epoch, at its end. Needs a trainer that announces epochs.

    The peak is that of the allocator where it rose during the epoch, else the highest value at a
    step's end; the allocator's counters are not reset, they belong to the script.
    """

    name = "memory-epochs"
    listens_to: tuple[EventKind, ...] = (
        EventKind.EPOCH_START,
        EventKind.STEP_END,
        EventKind.EVAL_END,
        EventKind.EPOCH_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("memory.epoch", "Number of the epoch that has ended, from 0.", cost=Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_start", "Memory at the start of the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_end", "Memory at the end of the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_peak", "Highest memory within the epoch.", "bytes", Cost.HOST, needs=("epochs",)),
        Metric(
            "memory.epoch_delta",
            "Memory at the end of the epoch less that at its start.",
            "bytes",
            Cost.HOST,
            needs=("epochs",),
        ),
        Metric("memory.epoch_cleanups", "Cleanups that ran within the epoch.", cost=Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_began", "When the epoch began, in seconds since 1970.", "s", Cost.HOST, needs=("epochs",)),
        Metric("memory.epoch_ended", "When the epoch ended, in seconds since 1970.", "s", Cost.HOST, needs=("epochs",)),
    )

    def __init__(self, device: TorchDevice | None = None, clock: Callable[[], float] = time.time) -> None:
        self.device = device or TorchDevice()
        self._clock = clock
        self._start: int | None = None
        self._began = 0.0
        self._epoch: float | None = None
        self._highest = 0
        self._peak_before = 0
        self._cleanups_before = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        stats = self.device.statistics()
        used = stats.get("allocated")
        if used is None:
            return ()
        peak = stats.get("peak", used)
        cleanups = event.run.actions_done.get("cleanup", 0) if event.run is not None else 0
        if event.kind is EventKind.EPOCH_START:
            self._start, self._began, self._highest = used, self._clock(), used
            self._peak_before, self._cleanups_before, self._epoch = peak, cleanups, event.epoch
            return ()
        if self._start is None:
            return ()
        self._highest = max(self._highest, used)
        if event.kind is not EventKind.EPOCH_END:
            return ()
        start, self._start = self._start, None
        values: dict[str, float] = {
            "memory.epoch_start": start,
            "memory.epoch_end": used,
            "memory.epoch_peak": peak if peak > self._peak_before else self._highest,
            "memory.epoch_delta": used - start,
            "memory.epoch_cleanups": cleanups - self._cleanups_before,
            "memory.epoch_began": self._began,
            "memory.epoch_ended": self._clock(),
        }
        if self._epoch is not None:
            values["memory.epoch"] = self._epoch
        return [Sample(name, event.step, float(value)) for name, value in values.items()]


class MemoryEventProbe:
    """Memory at every event of the loop. One call to the allocator each; only where a rule asks for it."""

    name = "memory-events"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.EPOCH_START,
        EventKind.STEP_START,
        EventKind.STEP_END,
        EventKind.EVAL_START,
        EventKind.EVAL_STEP,
        EventKind.EVAL_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
        EventKind.TRAIN_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("memory.at", "Memory held at one kind of event.", "bytes", Cost.HOST, labels=("event",)),
        Metric(
            "memory.step_growth",
            "Memory at the end of a step less that at its start, where the start is known.",
            "bytes",
            Cost.HOST,
            needs=("the start of the step",),
        ),
    )

    def __init__(self, device: TorchDevice | None = None) -> None:
        self.device = device or TorchDevice()
        self._at_start: int | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.late:  # the forward pass is over: this is no start
            self._at_start = None
            return ()
        used = self.device.statistics().get("allocated")
        if used is None:
            return ()
        samples = []
        if demand.wants("memory.at[]"):
            phase = event.phase
            samples.append(Sample("memory.at", event.step, float(used), (("event", event.kind.value),), phase))
        if event.kind is EventKind.STEP_START:
            self._at_start = used
        elif event.kind is EventKind.STEP_END and self._at_start is not None:
            samples.append(Sample("memory.step_growth", event.step, float(used - self._at_start)))
            self._at_start = None
        return samples


WARMUP_STEPS = 20
"""Allocators, caches and optimizers fill up during the first steps; that is no trend."""
POINTS = 64
"""Points kept. When they are full every second one goes, so that the trend spans the whole run."""
PARTS = 8
"""Stretches that must all lie above the one before them: a staircase of evaluations does not."""
MIN_GROWTH = 0.05
"""Growth from the first stretch to the last, as a part of the first, below which it is no trend:
caches and records of the process itself creep too."""
MIN_ROOM = 0.05
"""Part of the room that was free at first which must be used up by then: a forecast twenty times as far as what was seen
is a guess, and a memory of past batches that is filled, or a cache, ends long before."""
NO_END = 3.15e8
"""Ten years: what is said while memory does not grow. Finite, so that a rule can recover."""


class MemoryForecastProbe(CloserLooks):
    """Seconds until memory is full, if it goes on growing as it does.

    The trend is the median slope between the stretches of the run (Theil-Sen over their medians),
    and counts only if every stretch lies above the one before it and the whole rise is worth
    mentioning. Otherwise the answer is :data:`NO_END`.
    """

    name = "memory-forecast"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "memory.time_left",
            f"Seconds until memory is full at its present growth; {NO_END:.3g} while it does not grow.",
            "s",
            Cost.HOST,
        ),
    )

    def __init__(self, device: TorchDevice | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.device = device or TorchDevice()
        self._clock = clock
        super().__init__()
        self._points: list[tuple[float, int, int]] = []
        self._stride = 1
        self._first = 0
        self._stretch = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.looks(event, demand, ("memory.time_left",)):
            return ()
        self.rest(demand, ("memory.time_left",), calm=False)
        self._first = self._first or event.step
        steps = event.step - self._first
        if steps < WARMUP_STEPS or steps // self._stride == self._stretch:
            return ()
        self._stretch = steps // self._stride
        used = self.device.allocated_bytes()
        capacity = self.device.capacity_bytes()
        if not used or not capacity:
            return ()
        self._points.append((self._clock(), event.step, used))
        # Every second point goes and the stride doubles: the trend always spans the whole run.
        if len(self._points) > POINTS:
            del self._points[1::2]
            self._stride *= 2
        if len(self._points) < 2 * PARTS:
            return ()
        first = self._points[0][2]
        rates = self._rates() if used - first >= MIN_ROOM * (capacity - first) else None
        if rates is None:
            self.rest(demand, ("memory.time_left",), calm=True)
            return (Sample("memory.time_left", event.step, NO_END),)
        per_second, per_step = rates
        left = min(NO_END, max(0.0, (capacity - used) / per_second))
        facts = {
            "growth": f"{per_step / 2**20:.2f} MiB a step since step {self._points[0][1]:,}",
            "now": f"{used / 2**30:.2f} of {capacity / 2**30:.2f} GiB",
            "full": f"in about {max(0.0, capacity - used) / per_step:,.0f} steps",
        }
        return (Sample("memory.time_left", event.step, left, detail=lambda: facts),)

    def _rates(self) -> tuple[float, float] | None:
        """Growth in bytes per second and per step, or None if memory does not grow throughout."""
        size = len(self._points) / PARTS
        parts = [self._points[int(i * size) : int((i + 1) * size)] for i in range(PARTS)]
        levels = [statistics.median(p[2] for p in part) for part in parts]
        # One stretch that does not rise, and it is a staircase or a cache that has filled up.
        if any(after <= before for before, after in itertools.pairwise(levels)):
            return None
        if levels[-1] - levels[0] < MIN_GROWTH * levels[0]:
            return None
        per_second = _median_slope([statistics.median(p[0] for p in part) for part in parts], levels)
        per_step = _median_slope([statistics.median(p[1] for p in part) for part in parts], levels)
        return (per_second, per_step) if per_second > 0 and per_step > 0 else None


def _median_slope(xs: list[float], ys: list[float]) -> float:
    slopes = [(ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(len(xs)) for j in range(i + 1, len(xs)) if xs[j] > xs[i]]
    return statistics.median(slopes) if slopes else 0.0


EVERY, SETTLED_EVERY = 10, 20
"""Steps between two graphs that are marked; the second in a run that has settled."""
KEPT_IN_MIND = 100
"""Marks that are followed."""
NODES = 16
"""Nodes behind a loss that carry its mark: outputs that are kept hold those near them."""

_MARK = "healthcheck.kept"


class _Mark:
    """Lives as long as a node that carries it."""

    __slots__ = ("__weakref__",)


class KeptGraphProbe:
    """Marks the graph of one loss in ten, later in twenty, and counts the marks that are still there.

    Each node of torch's graph has a dictionary that lives and dies with it; the mark lies there. So nothing is kept
    alive, no heap is walked, and what holds a graph without a Python object of its own (the sum of a running
    ``total += loss``) is seen like a list of losses. A part that each step uses anew carries only its last mark.
    """

    name = "kept-graphs"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    rests_always = True
    provides: tuple[Metric, ...] = (
        Metric(
            "memory.kept_graphs",
            f"Steps whose graph is still held by something, of the last {EVERY * KEPT_IN_MIND:,}; estimated from one in "
            f"{EVERY}, later in {SETTLED_EVERY}.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        self._marks: deque[tuple[weakref.ref[_Mark], int, int]] = deque(maxlen=KEPT_IN_MIND)
        """Each with the steps for which it stands, and its own."""
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self.rests_until = next_look(event.step, EVERY, SETTLED_EVERY)
        if event.loss_graph is None or event.phase != "train":
            return ()
        step = event.step
        while self._marks and self._marks[0][2] < step - EVERY * KEPT_IN_MIND:
            self._marks.popleft()
        kept = sum([steps for mark, steps, _ in self._marks if mark() is not None])
        self._marks.append((_marked(event.loss_graph), EVERY if step < RUN_SETTLED else SETTLED_EVERY, step))
        return (Sample("memory.kept_graphs", step, float(kept)),)


def _marked(root: Any) -> weakref.ref[_Mark]:
    mark = _Mark()
    waiting: deque[Any] = deque([root])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < NODES:
        node = waiting.popleft()
        kind = type(node).__name__
        if id(node) in seen or kind.startswith("torch::autograd::"):
            continue
        seen[id(node)] = node
        if kind != "AccumulateGrad":  # as long-lived as its parameter
            node.metadata[_MARK] = mark
            for parent, _ in node.next_functions:
                if parent is not None:
                    waiting.append(parent)
    return weakref.ref(mark)
