"""Graphs of past steps that something still holds: a sum of losses, a list of outputs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import kind_of, parents_of
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

EVERY = 10
"""Steps between two graphs that are marked."""
KEPT_IN_MIND = 100
"""Marks that are followed."""
NODES = 16
"""Nodes behind a loss that carry its mark: outputs that are kept hold those near them."""

_MARK = "healthcheck.kept"


class _Mark:
    """Lives as long as a node that carries it."""

    __slots__ = ("__weakref__",)


class KeptGraphProbe:
    """Marks the graph of one loss in ten, and counts the marks that are still there.

    Each node of torch's graph has a dictionary that lives and dies with it; the mark lies there. So nothing is kept
    alive, no heap is walked, and what holds a graph without a Python object of its own (the sum of a running
    ``total += loss``) is seen like a list of losses. A part that each step uses anew carries only its last mark.
    """

    name = "kept-graphs"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "memory.kept_graphs",
            f"Steps whose graph is still held by something, of the last {EVERY * KEPT_IN_MIND:,}; estimated from one in {EVERY}.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        self._marks: deque[weakref.ref[_Mark]] = deque(maxlen=KEPT_IN_MIND)
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self.rests_until = event.step + EVERY
        if event.loss_graph is None or event.phase != "train":
            return ()
        kept = sum(mark() is not None for mark in self._marks)
        self._marks.append(_marked(event.loss_graph))
        return (Sample("memory.kept_graphs", event.step, float(EVERY * kept)),)


def _marked(root: Any) -> weakref.ref[_Mark]:
    mark = _Mark()
    waiting: deque[Any] = deque([root])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < NODES:
        node = waiting.popleft()
        if id(node) in seen or kind_of(node).startswith("torch::autograd::"):
            continue
        seen[id(node)] = node
        if kind_of(node) != "AccumulateGrad":  # as long-lived as its parameter
            node.metadata[_MARK] = mark
            waiting += parents_of(node)
    return weakref.ref(mark)
