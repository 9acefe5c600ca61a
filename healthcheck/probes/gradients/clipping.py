"""Gradient clipping: how often, and how hard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.resting import ask_again
from healthcheck.probes.transfer.late import Late
from healthcheck.probes.values import on_host, optimizer_labels, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


class ClippingProbe:
    """Compares the loop's own norm with its threshold. A loop that does not clip gives nothing."""

    name = "clipping"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("clip.applied", "1 if clipping shrank the gradients, else 0.", cost=Cost.DEVICE, needs=("clipping",)),
        Metric(
            "clip.ratio",
            "Factor that clipping applied: 1 is untouched, 0.1 is shrunk tenfold.",
            cost=Cost.DEVICE,
            needs=("clipping",),
        ),
        Metric(
            "clip.scaled",
            "1 if gradients were clipped while they carried the loss scale of a GradScaler, else 0.",
            needs=("clipping", "amp"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._given: dict[int, int] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.max_norm is None:
            if event.kind is EventKind.STEP_END:
                self.rests_until = ask_again(event.step)
            return ()
        if event.kind is EventKind.BEFORE_UPDATE and event.clipped_scaled is not None and event.loss_scale is not None:
            labels = optimizer_labels(event.optimizer_index)
            return [
                Sample("clip.scaled", event.step, float(event.clipped_scaled), labels),
                *self._how_hard(event, demand),
            ]
        return self._how_hard(event, demand)

    def _how_hard(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.skipped or self._given.get(event.optimizer_index) == event.step:
            return ()
        norm = scalar(event.grad_norm)
        if norm is None:
            return ()
        self._given[event.optimizer_index] = event.step
        labels = optimizer_labels(event.optimizer_index)
        limit = event.max_norm
        assert limit is not None, "a loop that does not clip was sent away"
        applied: Any = lambda norm: float(norm > limit)  # noqa: E731
        ratio: Any = lambda norm: min(1.0, limit / (norm + 1e-6))  # noqa: E731
        made = (("clip.applied", applied), ("clip.ratio", ratio))
        if on_host(norm):
            return [Sample(name, event.step, of(norm), labels) for name, of in made]
        return [Sample(name, event.step, Late(of, norm), labels) for name, of in made if demand.wants(name)]
