"""What data loaders give: nothing more, the same order in each pass, the same random numbers in all workers."""

from __future__ import annotations

import math
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow, UsedBatch
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.tensors import host_bytes, is_tensor, on_host
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.graph import all_behind, saved
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import ask_again

SETTLED = 10
"""Batches after which it is known how many updates one is good for."""
LONG = 50
"""Updates without a new batch, and times the longest wait so far, after which the graph is searched for the last batch."""
TENSORS = 4
"""Tensors of a batch that are remembered, weakly."""

_INPUTS = ("target", "indices", "mat1", "self", "input")
"""Names under which operations keep what they were given."""


class DryLoaderProbe:
    """Counts passes over a loader that gave nothing, and updates made with the last batch that it gave.

    *Empty passes*, in a row: the data set is an iterator that an earlier epoch used up. *Stale*: a loader gave a batch
    every few updates, gives none any more, and the loss is still over the tensors of the last one, by their
    addresses. Batches that are copied to another device are not recognised.
    """

    name = "dry-loaders"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS)
    rows_with = "found"
    provides: tuple[Metric, ...] = (
        Metric(
            "batch.empty_passes",
            "Consecutive passes over a training loader that gave no batch, after some that did.",
            needs=("a pass over the loader that gave no batch",),
        ),
        Metric(
            "batch.stale",
            "Updates since the loader's last batch, while the loss is still computed from it.",
            cost=Cost.HOST,
            needs=("many updates since the loader's last batch",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self.events_from = 0
        """Step from which on losses are to be shown, where steps are noted in rows."""
        self._batches = 0
        self._empty = 0
        self._came = 0
        """Step of the last batch."""
        self._longest = 1
        """Most updates made with one batch."""
        self._tensors: list[Callable[[], Any]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            # Announced as an empty batch: a pass that ended before it began.
            if event.n_samples != 0 or not self._batches:
                return ()
            self._empty += 1
            return (Sample("batch.empty_passes", event.step, float(self._empty)),)
        if event.phase != "train":
            return ()
        if event.batch is not None:
            return self._used(event.step, named_tensors(event.batch))
        if not self._batches:  # no loader has been seen so far
            self.rests_until = self.events_from = ask_again(event.step)
            return ()
        waited = event.step - self._came
        self.events_from = event.step - waited % LONG + LONG
        if self._batches < SETTLED or waited % LONG or waited < LONG * self._longest or event.loss_graph is None:
            return ()
        return (Sample("batch.stale", event.step, float(waited if self._is_over_last(event.loss_graph) else 0)),)

    def look_at_batch(self, row: StepRow, batch: UsedBatch) -> None:
        """A batch is used, in a step that is noted in a row."""
        if self._used(row.step, batch.tensors):
            row.found[self.name] = True

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        again = [row for row in rows if row.found.pop(self.name, False)]
        return [Sample("batch.empty_passes", row.step, 0.0, time=row.time) for row in again]

    def _used(self, step: int, tensors: Sequence[tuple[str, Any]]) -> Iterable[Sample]:
        """A batch that came from a loader, perhaps for another pass over it."""
        known = self._tensors
        if known and tensors and known[0]() is tensors[0][1]:
            return ()
        if self._batches and step - self._came > self._longest:
            self._longest = step - self._came
        self._batches += 1
        self._came, self.events_from = step, step + LONG
        self._tensors = [weakref.ref(tensor) for _, tensor in tensors[:TENSORS]]
        if not self._empty:
            return ()
        self._empty = 0
        return (Sample("batch.empty_passes", step, 0.0),)

    def _is_over_last(self, root: Any) -> bool:
        known = {tensor.data_ptr() for there in self._tensors if (tensor := there()) is not None} - {0}
        return bool(known) and any(
            is_tensor(kept := saved(node, name)) and kept.data_ptr() in known
            for node in all_behind(root)
            for name in _INPUTS
        )


ROWS = 256
"""Rows of a batch that are looked at."""
ROW_ELEMENTS = 64
"""Elements of each row that enter its hash, evenly spread."""
BITS = 20.0
"""Bits that the order of a tensor's rows must hold, so that it does not happen again by chance."""


class PassOrderProbe:
    """Compares the first batch of each pass with that of the pass before, where a sampler draws at random.

    A ``DistributedSampler`` without ``set_epoch`` gives every epoch one order, and so does a seed that is set anew at
    each epoch. It is enough that one tensor of the batch is the same, such as the labels: others may be augmented. Rows
    that are mostly alike prove nothing: their order must hold :data:`BITS` bits. A new optimizer begins a training of its
    own, with a fold or a trial, which may be seeded like the one before. Batches on a device are not read.
    """

    name = "pass-order"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "batch.pass_repeat",
            "Consecutive passes over a shuffled loader that began with the same batch as the pass before.",
            cost=Cost.HOST,
            needs=("batches", "a loader that shuffles"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self.events_from = 0
        """Step from which on events are wanted, where steps are noted in rows: the first of a pass."""
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
            if event.begins_pass:
                self.events_from = event.step
        elif event.kind is EventKind.LOSS:
            if event.batch is not None and self._begins:
                self._begins = False
                self._marks = marks(event.batch)
            elif not self._begins and self._marks is None:
                self.events_from = sys.maxsize
                if event.batch is None:
                    self.rests_until = ask_again(event.step)
        elif self._marks is not None and event.optimizer is not None and event.optimizer_index == 0:
            new, self._marks, self.events_from = self._marks, None, sys.maxsize
            # Folds and trials may be seeded alike on purpose, each with an optimizer of its own.
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


class WorkerDrawProbe:
    """Compares the generators that loader workers draw from, as they were before each worker's first batches.

    torch seeds its own generator, ``random`` and numpy's global one differently in each worker and each pass. A seed
    set in ``worker_init_fn`` undoes that, and a generator of the data set's own is copied into all workers as it is.
    Counted are generators that two workers found in one state, before their first batch and before their second, and
    drew from for both. Rows and streams of numbers that are only looked up are no draws.
    """

    name = "worker-draws"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY,)
    only_with = "worker_draws"
    provides: tuple[Metric, ...] = (
        Metric(
            "workers.alike",
            "Random generators from which several loader workers draw the same numbers.",
            cost=Cost.HOST,
            needs=("forked loader workers over a map-style data set",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        workers = event.worker_draws
        if event.phase != "train" or not workers or len(workers) < 2:
            return ()
        found = Counter((name, *marks) for draws in workers for name, marks in draws.items() if len(marks) > 1)
        alike = {tuple(marks): (name, count) for (name, *marks), count in found.items() if count > 1}

        place = where_called(event, "loader")

        def facts() -> Mapping[str, Any]:
            names = ", ".join(name for name, _ in alike.values())
            most = max((count for _, count in alike.values()), default=0)
            return {"which": names, "workers": f"{most} of {len(workers)}"} | place if alike else {}

        return (Sample("workers.alike", event.step, float(len(alike)), detail=facts),)
