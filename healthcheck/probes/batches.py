"""What the batches hold: targets, bad values, repetitions. Where the trainer shows its batches."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow, UsedBatch
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import Deferred, number, smallest, value_of
from healthcheck.device.tensors import HOST, host_bytes, on_host
from healthcheck.probes.labels import first_few
from healthcheck.probes.looks import ask_again

IGNORE = -100
"""The value that cross entropy leaves out by default; seen once, it is this run's convention."""
ONE_LABEL_ROWS = 8
"""Rows of a batch from which labels that are all alike say something."""
FEW_ELEMENTS, HASHED_ELEMENTS = 2048, 65_536
"""Elements of one tensor that enter its hash, evenly spread: of every batch, and of one that seems to have come before."""
SETTLED, LOOK_EVERY = 200, 10
"""Batches that are all looked through for labels that do not count, and one in how many afterwards while none has been found."""
_LABELS = ("labels", "label", "targets", "target", "y")


@dataclass(slots=True)
class BatchFacts:
    """What the batches of one step came to."""

    targets: list[Any] = field(default_factory=list)
    """Labels that count, of each micro-batch."""
    bad: list[tuple[str, Any, int]] = field(default_factory=list)
    """Tensors, with how many values are not finite, of how many."""
    repeats: int | None = None
    one_label: int | None = None


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
    noted = listens_to
    rows_with = "found"
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
        self._seen = 0
        """Batches so far."""
        self._mark: int | None = None
        self._whole_mark: int | None = None
        """Of a batch that seemed to be equal to the one before it."""
        self._run = 0
        self._last: Any = None
        self._facts: BatchFacts | None = None
        """Of the batches that were shown by events."""
        self._whole = False
        """Whether the batch is all that the data set holds: then there is no other one."""
        self._only_labels: set[int] = set()
        """Labels that were a whole batch's."""
        self._wants: tuple[bool, bool, bool] = (True, True, True)
        """Whether targets, labels and repetitions are wanted."""

    def plan(self, demand: Demand) -> None:
        wanted = [demand.wants(key) for key in ("batch.targets", "batch.one_label", "batch.hash_repeat")]
        self._wants = (wanted[0], wanted[1], wanted[2])

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            self._whole = None not in (event.n_samples, event.dataset_size) and event.n_samples == event.dataset_size
        if event.kind in (EventKind.BATCH_READY, EventKind.LOSS):
            # Some trainers show the batch only with its loss, and several losses may share one.
            if event.phase == "train" and event.batch is not None and event.batch is not self._last:
                self._last = event.batch
                self._facts = self._facts or BatchFacts()
                due = demand.due("batch.nonfinite", event.step)
                self._take(self._facts, named_tensors(event.batch), lambda: self._whole, due)
            return ()
        if event.kind is EventKind.STEP_END:
            if self._last is None:
                self.rests_until = ask_again(event.step)
            self._last = None
        facts, self._facts = self._facts, None
        return () if facts is None else _samples(event.step, facts)

    def look_at_batch(self, row: StepRow, batch: UsedBatch) -> None:
        """The same for a step that is noted in a row: what is seen now, :meth:`sample_rows` makes samples of later."""
        facts = row.found.get(self.name)
        if facts is None:  # the first passes of the step may have been shown by events
            facts, self._facts = self._facts or BatchFacts(), None
            row.found[self.name] = facts
        tensors = batch.tensors
        known = len(facts.targets), len(facts.bad)
        self._take(facts, tensors, lambda: _is_whole(batch), "batch.nonfinite" in batch.demand.due_now)
        if (len(facts.targets), len(facts.bad)) != known:
            made = [*facts.targets[known[0] :], *(count for _, count, _ in facts.bad[known[1] :])]
            row.late += [count for count in made if isinstance(count, Deferred)]

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            facts = row.found.pop(self.name, None)
            if facts is not None:
                samples = _samples(row.step, facts)
                for sample in samples:
                    sample.time = row.update_time if row.seen else row.time
                made += samples
        return made

    def _take(
        self, facts: BatchFacts, tensors: Sequence[tuple[str, Any]], whole: Callable[[], bool], finite: bool
    ) -> None:
        """One more batch of a step.

        :param whole: whether it is all that there is to draw from.
        :param finite: whether to count what is not finite.
        """
        targets, labels, repeats = self._wants
        self._seen += 1
        if targets or labels:
            last = tensors[-1][1] if tensors else None
            for name, tensor in tensors:
                if not tensor.is_floating_point() and _is_label(name, tensor, last=tensor is last):
                    if targets:
                        self._count_targets(facts, name, tensor)
                    if labels:
                        self._look_at_labels(facts, tensor)
        if finite:
            for name, tensor in tensors:
                if tensor.is_floating_point() and str(tensor.layout) == "torch.strided":
                    count = number((~tensor.detach().isfinite()).sum())
                    facts.bad.append((name, count, tensor.numel()))
        if repeats:
            # Equal contents, whatever objects they come in: loaders make new tensors for each batch.
            mark = content_hash(tensors)
            if mark is not None:
                # Only in a row: an epoch without shuffling brings all batches again, in their order.
                same = mark == self._mark and not whole() and self._equal(tensors)
                self._run = self._run + 1 if same else 0
                self._mark = mark
                facts.repeats = self._run if facts.repeats is None else max(facts.repeats, self._run)

    def _equal(self, tensors: Sequence[tuple[str, Any]]) -> bool:
        """Whether a batch that agrees with the one before it at a few places agrees at many: known from the second time on."""
        mark = content_hash(tensors, HASHED_ELEMENTS)
        before, self._whole_mark = self._whole_mark if self._run else None, mark
        return before is None or before == mark

    def _look_at_labels(self, facts: BatchFacts, tensor: Any) -> None:
        """One label a row. Labels that are the same in all batches are no classes; then there is nothing to mix."""
        if tensor.shape[0] != tensor.numel() or tensor.numel() < ONE_LABEL_ROWS or not on_host(tensor):
            return
        if int(tensor[0]) != int(tensor[-1]):  # nearly always two rows are enough
            alike = False
        else:
            low, high = map(int, tensor.detach().aminmax())
            alike = low == high
            if alike:
                self._only_labels.add(low)
        hit = int(alike and len(self._only_labels) > 1)
        facts.one_label = hit if facts.one_label is None else max(facts.one_label, hit)

    def _count_targets(self, facts: BatchFacts, name: str, tensor: Any) -> None:
        known = name in self._convention
        # On a device, asking for a sign of the convention would be a wait.
        if not known and (not on_host(tensor) or (self._seen > SETTLED and self._seen % LOOK_EVERY)):
            return
        left_out = tensor.detach() == IGNORE
        if not known:
            if not bool(left_out.any()):
                return
            self._convention.add(name)
        facts.targets.append(number((~left_out).sum()))


def _is_whole(batch: UsedBatch) -> bool:
    """Whether a batch is all that its data set holds."""
    first = batch.tensors[0][1]
    return bool(first.dim() > 0 and batch.rows() == first.shape[0])


def _samples(step: int, facts: BatchFacts) -> list[Sample]:
    """What the batches of a step came to."""
    samples = []
    if facts.targets:
        samples.append(Sample("batch.targets", step, smallest(facts.targets)))
    if facts.bad:
        bad = facts.bad

        def where() -> Mapping[str, Any]:
            found = ((name, value_of(count), size) for name, count, size in bad)
            hit = dict.fromkeys(f"{name}, {count:,.0f} of {size:,} values" for name, count, size in found if count)
            return {"where": first_few(hit)} if hit else {}

        first, *others = (count for _, count, _ in bad)
        samples.append(Sample("batch.nonfinite", step, sum(others, first), detail=where))
    if facts.repeats is not None:
        samples.append(Sample("batch.hash_repeat", step, float(facts.repeats)))
    if facts.one_label is not None:
        samples.append(Sample("batch.one_label", step, float(facts.one_label)))
    return samples


def _is_label(name: str, tensor: Any, *, last: bool) -> bool:
    """Of tensors that hold no floats: labels are known by their name, or are the last integer tensor of a tuple."""
    if tensor.is_complex() or tensor.dim() == 0:
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


def content_hash(tensors: Sequence[tuple[str, Any]], elements: int = FEW_ELEMENTS) -> int | None:
    """A hash of shapes, types and (evenly sampled) contents; None if any lies on a device."""
    import torch

    mark = 0
    for name, tensor in tensors:
        if tensor.device.type not in HOST or tensor.layout is not torch.strided:
            return None
        flat = tensor.detach().reshape(-1)
        # Large images: enough to tell batches apart, at a bounded cost.
        flat = flat[:: max(1, flat.numel() // elements)].contiguous()
        mark = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), mark)
        mark = zlib.crc32(host_bytes(flat), mark)
    return mark if tensors else None
