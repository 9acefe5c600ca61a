"""Loaders that have nothing more to give while the loop goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.data.batches import named_tensors
from healthcheck.probes.graph.walk import all_behind, saved
from healthcheck.probes.values import is_tensor
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

SETTLED = 10
"""Batches after which it is known how many updates one is good for."""
LONG = 50
"""Updates, and times the longest wait so far, without a new batch after which it is looked what the loss is over."""
TENSORS = 4
"""Tensors of a batch that are remembered, weakly."""

_INPUTS = ("target", "indices", "mat1", "self", "input")
"""Names under which operations keep what they were given."""


class DryLoaderProbe:
    """Counts passes over a loader that gave nothing, and updates made with the last batch that it gave.

    *Empty passes*, in a row: the data set is an iterator that an earlier epoch used up. *Stale*: a loader gave a batch
    every few updates, gives none any more, and the loss is still over the tensors of the last one, as told by their
    addresses. Batches that are copied to another device are not recognised.
    """

    name = "dry-loaders"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS)
    provides: tuple[Metric, ...] = (
        Metric(
            "batch.empty_passes", "Passes in a row over a loader for training that gave no batch, after some that did."
        ),
        Metric(
            "batch.stale", "Updates since the loader's last batch, while the loss is still over it.", cost=Cost.HOST
        ),
    )

    def __init__(self) -> None:
        self._batches = 0
        self._empty = 0
        self._came = 0
        """Step of the last batch."""
        self._longest = 1
        """Most updates made with one batch."""
        self._tensors: list[Callable[[], Any]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            return self._batch_ready(event)
        if event.phase != "train":
            return ()
        if event.batch is not None:
            self._came = event.step
            self._tensors = [
                weak(t) for _, t in zip(range(TENSORS), (t for _, t in named_tensors(event.batch)), strict=False)
            ]
            return ()
        waited = event.step - self._came
        if self._batches < SETTLED or waited % LONG or waited < LONG * self._longest or event.loss_graph is None:
            return ()
        return (Sample("batch.stale", event.step, float(waited if self._is_over_last(event.loss_graph) else 0)),)

    def _batch_ready(self, event: Event) -> Iterable[Sample]:
        if event.n_samples == 0:
            if self._batches:
                self._empty += 1
                return (Sample("batch.empty_passes", event.step, float(self._empty)),)
            return ()
        if self._batches:
            self._longest = max(self._longest, event.step - self._came)
        self._batches += 1
        self._came = event.step
        if self._empty:
            self._empty = 0
            return (Sample("batch.empty_passes", event.step, 0.0),)
        return ()

    def _is_over_last(self, root: Any) -> bool:
        known = {tensor.data_ptr() for there in self._tensors if (tensor := there()) is not None} - {0}
        return bool(known) and any(
            is_tensor(kept := saved(node, name)) and kept.data_ptr() in known
            for node in all_behind(root)
            for name in _INPUTS
        )
