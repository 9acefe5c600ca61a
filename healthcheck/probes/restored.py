"""Weights that an update moved and that were put back before the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.growth import looked_at
from healthcheck.probes.sampling import ElementSampler, SampledRows
from healthcheck.probes.values import optimizer_labels, scalar, weak
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


@dataclass(slots=True)
class _Watch:
    optimizer: Callable[[], Any]
    sampler: ElementSampler
    before: list[SampledRows]
    after: list[SampledRows] | None = None


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
            if watch is not None and watch.after is None:
                if event.skipped:
                    del self._watches[index]
                else:
                    watch.after = watch.sampler.weights("after")
            return ()
        samples = []
        if watch is not None and watch.after is not None:
            del self._watches[index]
            samples.append(self._compare(watch, watch.after, event))
        if demand.due("params.restored", event.step):
            sampler = watch.sampler if watch is not None else ElementSampler(looked_at(optimizer))
            if sampler.groups:
                self._watches[index] = _Watch(weak(optimizer), sampler, sampler.weights("before"))
        return samples

    @staticmethod
    def _compare(watch: _Watch, after: list[SampledRows], event: Event) -> Sample:
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

        labels = optimizer_labels(event.optimizer_index)
        return Sample("params.restored", event.step, scalar(share), labels, detail=facts)
