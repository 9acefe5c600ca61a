"""Passes over the data that are drawn at random, and come in one and the same order."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.data.batches import named_tensors
from healthcheck.probes.values import host_bytes, on_host
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

ROWS = 256
"""Rows of a batch that are looked at."""
ROW_ELEMENTS = 64
"""Elements of each row that enter its hash, evenly spread."""
BITS = 20.0
"""Bits that the order of a tensor's rows must hold, so that it does not come again by chance."""


class PassOrderProbe:
    """Compares the first batch of each pass with that of the pass before, where a sampler draws at random.

    A ``DistributedSampler`` without ``set_epoch`` gives every epoch one order, and so does a seed that is set anew at
    each epoch. It is enough that one tensor of the batch is the same, such as the labels: others may be augmented. Rows
    that are mostly alike prove nothing: their order must hold :data:`BITS` bits. A new optimizer begins a training of its
    own, with a fold or a trial, which may be seeded like the one before. Batches on a device are not read.
    """

    name = "pass-order"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "batch.pass_repeat",
            "Passes in a row, under a sampler that draws at random, that began with the batch of the pass before.",
            cost=Cost.HOST,
            needs=("batches", "a loader that draws at random"),
        ),
    )

    def __init__(self) -> None:
        self._begins = False
        self._marks: frozenset[int] | None = None
        """Of the first batch of the pass that has just begun."""
        self._before: frozenset[int] = frozenset()
        self._optimizer: Callable[[], Any] = lambda: None
        """That of the pass before."""
        self._row = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            self._begins = event.begins_pass
        elif event.kind is EventKind.LOSS:
            if self._begins and event.batch is not None:
                self._begins = False
                self._marks = marks(event.batch)
        elif self._marks is not None and event.optimizer is not None and event.optimizer_index == 0:
            new, self._marks = self._marks, None
            same = self._optimizer() is event.optimizer and bool(new & self._before)
            self._row = self._row + 1 if same else 0
            self._before, self._optimizer = new, weak(event.optimizer)
            return (Sample("batch.pass_repeat", event.step, float(self._row)),)
        return ()


def marks(batch: Any) -> frozenset[int]:
    """A hash of each tensor on the host whose rows come in an order that says something."""
    found = set()
    for name, tensor in named_tensors(batch):
        if tensor.dim() and tensor.shape[0] > 1 and on_host(tensor) and str(tensor.layout) == "torch.strided":
            rows = _hashed_rows(tensor)
            if _bits(rows) >= BITS:
                found.add(zlib.crc32(repr(rows).encode(), zlib.crc32(name.encode())))
    return frozenset(found)


def _hashed_rows(tensor: Any) -> tuple[int, ...]:
    rows = tensor.detach()[:ROWS].flatten(1) if tensor.dim() > 1 else tensor.detach()[:ROWS].unsqueeze(1)
    rows = rows[:, :: max(1, rows.shape[1] // ROW_ELEMENTS)].contiguous()
    if not rows.numel():
        return ()
    data = host_bytes(rows)
    width = len(data) // len(rows)
    return tuple(zlib.crc32(data[start : start + width]) for start in range(0, len(data), width))


def _bits(rows: tuple[int, ...]) -> float:
    """Logarithm of the number of orders in which these rows can come."""
    orders = math.lgamma(len(rows) + 1) - sum(math.lgamma(n + 1) for n in Counter(rows).values())
    return orders / math.log(2)
