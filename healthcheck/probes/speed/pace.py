"""Whether steps get slower for a reason of their own: not because they do more, nor because the machine is busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import near, shape_of, source_of
from healthcheck.probes.memory import host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

EVERY = 8
"""Steps between two looks."""
LOOKS = 6
"""Looks whose median is the pace: the first ones, without the very first, and the newest ones."""


class PaceProbe:
    """How the time per value of the loss has grown since the start.

    From the time between two looks is taken what the thread spent waiting for a processor: that is the machine's
    doing. The rest is divided by the largest number of values in the graph of the loss near its root (tokens times
    classes, say): longer sequences and larger batches take longer. Without such a graph it is the time alone.
    """

    name = "pace"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "time.pace",
            "How many times as long as at first a step takes for each value of its loss, waits for a processor left out.",
            cost=Cost.HOST,
        ),
    )

    def __init__(
        self, clock: Callable[[], float] = perf_counter, waited: Callable[[], float] = host.waited_for_cpu
    ) -> None:
        self._clock, self._waited = clock, waited
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=LOOKS)
        self._last: tuple[int, float] | None = None
        self._due = 1
        self._terms = 0
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.step < self._due:
            self.rests_until = self._due
            return ()
        if event.kind is EventKind.LOSS:
            self._terms = terms(event.loss_graph) if event.loss_graph is not None else 0
            return ()
        now, step = self._clock() - self._waited(), event.step
        last, self._last = self._last, (step, now)
        self._due = self.rests_until = step + EVERY
        if last is None or step <= last[0]:
            return ()
        pace = max(0.0, now - last[1]) / (step - last[0]) / (self._terms or 1)
        if len(self._first) <= LOOKS:
            self._first.append(pace)
        self._recent.append(pace)
        if len(self._first) <= LOOKS:
            return ()
        usual = median(self._first[1:])
        return (Sample("time.pace", step, median(self._recent) / usual),) if usual else ()


def terms(root: Any) -> int:
    """The largest number of values of a node near the root of a loss's graph."""
    largest = 1
    for node in near(root):
        for shape in (shape_of(node), shape_of(source_of(node))):
            size = 1
            for length in shape:
                size *= length
            largest = max(largest, size)
    return largest
