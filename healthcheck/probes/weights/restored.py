"""Weights that an update moved and that were put back before the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.transfer.late import Late, LateTable
from healthcheck.probes.values import optimizer_labels, scalar
from healthcheck.probes.weights.growth import looked_at
from healthcheck.probes.weights.moved import ROWS
from healthcheck.probes.weights.sampling import ElementSampler, SampledRows
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Labels, Metric, Sample


@dataclass(slots=True)
class _Watch:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    before: list[SampledRows]
    after: list[SampledRows] | None = None
    moved: list[LateTable] | None = None
    """What the update changed, where the device has summed it up."""


class RestoredWeightProbe:
    """Compares sampled weights before an update, after it, and before the next one.

    A tensor is *restored* if the update changed it and it then was again what it had been, to the last bit. A clamp
    that holds weights at plus or minus one bound does that by design: rows of one size throughout are left out.
    """

    name = "restored-weights"
    stretchable = ("params.restored",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "params.restored",
            "Part of the looked-at tensors that an update moved and that were put back before the next.",
            "fraction",
            Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._watches: dict[int, _Watch] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer, index = event.optimizer, event.optimizer_index
        if optimizer is None:
            return ()
        watch = self._watches.get(index)
        if watch is not None and watch.optimizer() is not optimizer:
            del self._watches[index]
            watch = None
        if event.kind is EventKind.AFTER_UPDATE:
            if watch is not None and watch.after is None and watch.moved is None:
                if event.skipped:
                    del self._watches[index]
                    return ()
                vectors = watch.sampler.compare(watch.before, watch.before)
                if vectors is None:
                    watch.after = watch.sampler.weights("after")
                else:
                    watch.moved = [LateTable(vector) for vector in vectors]
            return ()
        samples = []
        if watch is not None and (watch.after is not None or watch.moved is not None):
            del self._watches[index]
            compared = self._compare(watch, event)
            if compared is not None:
                samples.append(compared)
        if demand.due("params.restored", event.step):
            sampler = watch.sampler if watch is not None else ElementSampler(looked_at(optimizer))
            if sampler.groups:
                self._watches[index] = _Watch(weak(optimizer), sampler, sampler.weights("before"))
        if index not in self._watches:
            self.rests_until = demand.next_due(("params.restored",), event.step)
        return samples

    def _compare(self, watch: _Watch, event: Event) -> Sample | None:
        labels = optimizer_labels(event.optimizer_index)
        if watch.after is not None:
            return self._share(watch, watch.after, event.step, labels)
        vectors = watch.sampler.compare(watch.before, watch.before)
        if vectors is None or watch.moved is None:  # they lie in memory in another way than before the update
            return None
        return _late_share(watch.moved, [LateTable(vector) for vector in vectors], event.step, labels)

    @staticmethod
    def _share(watch: _Watch, after: list[SampledRows], step: int, labels: Labels) -> Sample:
        import torch

        now = watch.sampler.weights("now")
        hits, moves = [], []
        for old, moved, new in zip(watch.before, after, now, strict=True):
            sizes = old.values.abs()
            changed = (moved.values != old.values).any(1) & (sizes.amax(1) != sizes.amin(1))
            hits.append((changed & (new.values == old.values).all(1)).sum())
            moves.append(changed.sum())
        home = hits[0].device
        hit = torch.stack([h.to(home) for h in hits]).sum()
        share = hit / torch.stack([m.to(home) for m in moves]).sum().clamp(min=1)
        count = sum(len(rows.indices) for rows in now)

        def facts() -> Mapping[str, Any]:
            return {"tensors": f"{int(hit):,} of {count:,} tensors looked at"}

        return Sample("params.restored", step, scalar(share), labels, detail=facts)


def _late_share(moved: list[LateTable], now: list[LateTable], step: int, labels: Labels) -> Sample:
    """The same on the host from sums of each tensor's elements, in the rows of :data:`healthcheck.probes.weights.moved.ROWS`.

    Weights of one size throughout have as many squares of the largest as they have elements that are not zero.
    """
    counted: list[int] = []

    def compute(*tables: Sequence[float]) -> float:
        hits = moves = count = 0
        for then, today in zip(tables[: len(moved)], tables[len(moved) :], strict=True):
            n = len(then) // ROWS
            count += n
            for k in range(n):
                squares, changed, there, largest = (then[row * n + k] for row in (1, 2, 3, 5))
                if changed and not math.isclose(squares, there * largest * largest, rel_tol=1e-5):
                    moves += 1
                    hits += not today[2 * n + k]
        counted[:] = [hits, count]
        return hits / max(moves, 1)

    def facts() -> Mapping[str, Any]:
        return {"tensors": f"{counted[0]:,} of {counted[1]:,} tensors looked at"} if counted else {}

    return Sample("params.restored", step, Late(compute, *moved, *now), labels, detail=facts)
