"""Loss scaling in mixed precision: the scale, and updates that it threw away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.values import on_host, optimizer_labels, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

SEARCH_FLOOR = 1.0
"""While no update was applied yet, skips above this scale are the scaler's search for a start
value (it begins at 65536 and halves), not a streak."""


class LossScaleProbe:
    """Follows a ``GradScaler``. Without one (and without skipped steps) it gives nothing."""

    name = "loss-scale"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("amp.scale", "Loss scale.", needs=("amp",)),
        Metric("amp.skipped", "1 if the scaler skipped this update, else 0.", needs=("amp",)),
        Metric(
            "amp.skipped_streak",
            "Updates skipped in a row; the search for the first scale (down to 1) is not counted.",
            needs=("amp",),
        ),
    )

    def __init__(self) -> None:
        self._streak: dict[int, Any] = {}
        self._applied: set[int] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        scale = scalar(event.loss_scale)
        if scale is None and not event.skipped:
            if event.optimizer is not None:
                self._applied.add(event.optimizer_index)
            return ()
        index, labels = event.optimizer_index, optimizer_labels(event.optimizer_index)
        samples = []
        if scale is not None:
            samples.append(Sample("amp.scale", event.step, scale, labels))
        if event.skipped is None:
            return samples
        streak: Any = 0.0
        if event.skipped:
            streak = self._streak.get(index, 0.0) + self._counts(index, scale)
        else:
            self._applied.add(index)
        self._streak[index] = streak
        samples.append(Sample("amp.skipped", event.step, float(event.skipped), labels))
        samples.append(Sample("amp.skipped_streak", event.step, streak, labels))
        return samples

    def _counts(self, index: int, scale: Any) -> Any:
        if index in self._applied or scale is None:
            return 1.0
        if on_host(scale):
            return float(scale <= SEARCH_FLOOR)
        return (scale <= SEARCH_FLOOR).float()
