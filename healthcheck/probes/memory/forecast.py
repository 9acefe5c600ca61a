"""How long memory lasts: a robust trend of what stays allocated after each step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from time import monotonic

from healthcheck.events import Event, EventKind
from healthcheck.probes.memory.device import TorchDevice
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

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


class MemoryForecastProbe:
    """Seconds until memory is full, if it goes on growing as it does.

    The trend is the median slope between the stretches of the run (Theil-Sen over their medians),
    and counts only if every stretch lies above the one before it and the whole rise is worth
    mentioning. Otherwise the answer is :data:`NO_END`.
    """

    name = "memory-forecast"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
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
        self._points: list[tuple[float, int, int]] = []
        self._stride = 1
        self._first = 0
        self._stretch = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
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
        if len(self._points) > POINTS:
            del self._points[1::2]
            self._stride *= 2
        if len(self._points) < 2 * PARTS:
            return ()
        first = self._points[0][2]
        rates = self._rates() if used - first >= MIN_ROOM * (capacity - first) else None
        if rates is None:
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
