"""What the batches hold: targets, bad values, repetitions. Where the trainer shows its batches."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number, smallest, value_of
from healthcheck.device.tensors import host_bytes, on_host
from healthcheck.probes.labels import first_few
from healthcheck.probes.looks import ask_again

IGNORE = -100
"""The value that cross entropy leaves out by default; seen once, it is this run's convention."""
ONE_LABEL_ROWS = 8
"""Rows of a batch from which labels that are all alike say something."""
HASHED_ELEMENTS = 65_536
"""Elements of one tensor that enter its hash, evenly spread."""
_LABELS = ("labels", "label", "targets", "target", "y")


class BatchProbe:
    """Looks at each micro-batch; a step has the worst of its micro-batches.

    Tensors on the host are read; tensors on a device only take part in device arithmetic, and are
    not hashed.
    """

    name = "batches"
    stretchable = ("batch.nonfinite",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (
        EventKind.BATCH_READY,
        EventKind.LOSS,
        EventKind.BEFORE_UPDATE,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric(
            "batch.targets",
            f"Labels that count in the step's micro-batch with the fewest of them; {IGNORE} marks labels that do not count.",
            cost=Cost.DEVICE,
            needs=("batches", "labels that mark what does not count"),
        ),
        Metric(
            "batch.nonfinite", "NaN and infinite values in the step's batches.", cost=Cost.DEVICE, needs=("batches",)
        ),
        Metric(
            "batch.hash_repeat",
            "How many batches just before this one were equal to it, in a row.",
            cost=Cost.HOST,
            needs=("batches",),
        ),
        Metric(
            "batch.one_label",
            "1 if all rows of the batch have one label, and other batches had another one; else 0.",
            cost=Cost.HOST,
            needs=("batches", "class labels in the batch"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._convention: set[str] = set()
        self._mark: int | None = None
        self._run = 0
        self._last: Any = None
        self._targets: list[Any] = []
        """Labels that count, of each micro-batch of the step."""
        self._bad: list[tuple[str, Any, int]] = []
        """Tensors of the step's batches, with how many values are not finite, of how many."""
        self._repeats: int | None = None
        self._whole = False
        """Whether the batch is all that the data set holds: then there is no other one."""
        self._only_labels: set[int] = set()
        """Labels that were a whole batch's."""
        self._one_label: int | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            self._whole = None not in (event.n_samples, event.dataset_size) and event.n_samples == event.dataset_size
        if event.kind in (EventKind.BATCH_READY, EventKind.LOSS):
            # Some trainers show the batch only with its loss, and several losses may share one.
            if event.phase == "train" and event.batch is not None and event.batch is not self._last:
                self._last = event.batch
                self._take(event, demand)
            return ()
        if event.kind is EventKind.STEP_END:
            if self._last is None:
                self.rests_until = ask_again(event.step)
            self._last = None
        step, samples = event.step, []
        if self._targets:
            samples.append(Sample("batch.targets", step, smallest(self._targets)))
        if self._bad:
            bad = self._bad

            def facts() -> Mapping[str, Any]:
                found = ((name, value_of(count), size) for name, count, size in bad)
                hit = dict.fromkeys(f"{name}, {count:,.0f} of {size:,} values" for name, count, size in found if count)
                return {"where": first_few(hit)} if hit else {}

            first, *others = (count for _, count, _ in bad)
            samples.append(Sample("batch.nonfinite", step, sum(others, first), detail=facts))
        if self._repeats is not None:
            samples.append(Sample("batch.hash_repeat", step, float(self._repeats)))
        if self._one_label is not None:
            samples.append(Sample("batch.one_label", step, float(self._one_label)))
        self._targets, self._bad, self._repeats, self._one_label = [], [], None, None
        return samples

    def _take(self, event: Event, demand: Demand) -> None:
        tensors = named_tensors(event.batch)
        for name, tensor in tensors:
            if _is_label(name, tensor, last=tensor is tensors[-1][1]):
                if demand.wants("batch.targets"):
                    self._count_targets(name, tensor)
                if demand.wants("batch.one_label"):
                    self._look_at_labels(tensor)
        if demand.due("batch.nonfinite", event.step):
            for name, tensor in tensors:
                if tensor.is_floating_point() and str(tensor.layout) == "torch.strided":
                    count = number((~tensor.detach().isfinite()).sum())
                    self._bad.append((name, count, tensor.numel()))
        if demand.wants("batch.hash_repeat"):
            # Equal contents, whatever objects they come in: loaders make new tensors for each batch.
            mark = content_hash(tensors)
            if mark is not None:
                # Only in a row: an epoch without shuffling brings all batches again, in their order.
                self._run = self._run + 1 if mark == self._mark and not self._whole else 0
                self._mark = mark
                self._repeats = self._run if self._repeats is None else max(self._repeats, self._run)

    def _look_at_labels(self, tensor: Any) -> None:
        """One label a row. Labels that are the same in all batches are no classes; then there is nothing to mix."""
        if not on_host(tensor):
            return
        if tensor.numel() < ONE_LABEL_ROWS or tensor.shape[0] != tensor.numel():
            return
        if int(tensor[0]) != int(tensor[-1]):  # nearly always two rows are enough
            alike = False
        else:
            low, high = map(int, tensor.detach().aminmax())
            alike = low == high
            if alike:
                self._only_labels.add(low)
        hit = int(alike and len(self._only_labels) > 1)
        self._one_label = hit if self._one_label is None else max(self._one_label, hit)

    def _count_targets(self, name: str, tensor: Any) -> None:
        left_out = tensor.detach() == IGNORE
        if name not in self._convention:
            if not on_host(left_out) or not bool(left_out.any()):
                return  # no sign of the convention (on a device, asking would be a wait)
            self._convention.add(name)
        self._targets.append(number((~left_out).sum()))


def _is_label(name: str, tensor: Any, *, last: bool) -> bool:
    """Labels are known by their name, or are the last integer tensor of a tuple."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() == 0:
        return False
    leaf = name.rsplit(".", 1)[-1]
    return leaf in _LABELS or (leaf.isdigit() and last)


def named_tensors(batch: Any, name: str = "", depth: int = 4) -> list[tuple[str, Any]]:
    """Tensors in a batch of mappings, sequences and dataclasses, with the path to each."""
    torch = sys.modules.get("torch")
    found: list[tuple[str, Any]] = []
    if torch is not None:
        _add_tensors(found, torch.Tensor, batch, name, depth)
    return found


def _add_tensors(found: list[tuple[str, Any]], kind: type, batch: Any, name: str, depth: int) -> None:
    if isinstance(batch, kind):
        found.append((name or "batch", batch))
        return
    if depth == 0 or isinstance(batch, (str, bytes)):
        return
    if isinstance(batch, Mapping):
        parts: Iterable[tuple[Any, Any]] = batch.items()
    elif isinstance(batch, (list, tuple)):
        parts = enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = [(f.name, getattr(batch, f.name)) for f in fields(batch)]
    else:
        return
    for key, value in parts:
        path = f"{name}.{key}" if name else str(key)
        if isinstance(value, kind):  # at once: each call costs, and most batches are flat
            found.append((path, value))
        else:
            _add_tensors(found, kind, value, path, depth - 1)


def content_hash(tensors: list[tuple[str, Any]]) -> int | None:
    """A hash of shapes, types and (evenly sampled) contents; None if any lies on a device."""
    import torch

    mark = 0
    for name, tensor in tensors:
        if not on_host(tensor) or tensor.layout is not torch.strided:
            return None
        flat = tensor.detach().reshape(-1)
        # Large images: enough to tell batches apart, at a bounded cost.
        flat = flat[:: max(1, flat.numel() // HASHED_ELEMENTS)].contiguous()
        mark = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), mark)
        mark = zlib.crc32(host_bytes(flat), mark)
    return mark if tensors else None
