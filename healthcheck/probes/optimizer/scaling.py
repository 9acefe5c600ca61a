"""Loss scaling in mixed precision: the scale, and updates that it threw away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.resting import ask_again
from healthcheck.probes.values import on_host, optimizer_labels, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

SEARCH_FLOOR = 1.0
"""While no update was applied yet, skips above this scale are the scaler's search for a start
value (it begins at 65536 and halves), not a streak."""


class LossScaleProbe:
    """Follows a ``GradScaler``. Without one (and without skipped steps) it gives nothing."""

    name = "loss-scale"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("amp.scale", "Loss scale.", cost=Cost.DEVICE, needs=("amp",)),
        Metric("amp.skipped", "1 if the scaler skipped this update, else 0.", cost=Cost.DEVICE, needs=("amp",)),
        Metric(
            "amp.skipped_streak",
            "Updates skipped in a row; the search for the first scale (down to 1) is not counted.",
            cost=Cost.DEVICE,
            needs=("amp",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._streak: dict[int, Any] = {}
        self._applied: set[int] = set()
        self._searching: dict[int, Any] = {}
        """1 on the device until an update was applied, for optimizers whose scaler decides there."""
        self._told: dict[int, int] = {}
        """Step for which ``amp.skipped`` was given before the update, by optimizer."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BEFORE_UPDATE:
            return self._before(event)
        scale = scalar(event.loss_scale)
        if scale is None and not event.skipped:
            if event.optimizer is not None:
                self._applied.add(event.optimizer_index)
                self.rests_until = ask_again(event.step)
            return ()
        labels = optimizer_labels(event.optimizer_index)
        samples = []
        if scale is not None:
            samples.append(Sample("amp.scale", event.step, scale, labels))
        if event.skipped is not None and self._told.get(event.optimizer_index) != event.step:
            samples += self._skipped(event, float(event.skipped), scale)
        return samples

    def _before(self, event: Event) -> Iterable[Sample]:
        """Whether this update will be applied, so that rules on its gradients know it before they judge them.

        A scaler that drives a fused optimizer leaves the decision to it: ``found_inf`` is on the device.
        Any other has looked already, and would not have called the optimizer.
        """
        if event.loss_scale is None:
            return ()
        found = getattr(event.optimizer, "found_inf", None)
        self._told[event.optimizer_index] = event.step
        return self._skipped(event, 0.0 if found is None else scalar(found), scalar(event.loss_scale))

    def _skipped(self, event: Event, skipped: Any, scale: Any) -> list[Sample]:
        index, labels = event.optimizer_index, optimizer_labels(event.optimizer_index)
        before = self._streak.get(index, 0.0)
        if on_host(skipped):
            streak = before + self._counts(index, scale) if skipped else 0.0
            if not skipped:
                self._applied.add(index)
        else:
            streak = self._late_streak(index, skipped, scale, before)
        self._streak[index] = streak
        return [
            Sample("amp.skipped", event.step, float(skipped > 0) if on_host(skipped) else skipped, labels),
            Sample("amp.skipped_streak", event.step, streak, labels),
        ]

    def _late_streak(self, index: int, skipped: Any, scale: Any, before: Any) -> Any:
        """The same on the device: an update that is applied starts the count again, and ends the search."""
        import torch

        if index not in self._searching:
            self._searching[index] = torch.ones((), device=skipped.device)
        gone = skipped.reshape(()) > 0
        still = self._searching[index] * gone
        counts = 1.0 if scale is None else torch.where(still > 0, (scale <= SEARCH_FLOOR).float(), 1.0)
        self._searching[index] = still
        return torch.where(gone, before + counts, 0.0)

    def _counts(self, index: int, scale: Any) -> Any:
        if index in self._applied or scale is None:
            return 1.0
        if on_host(scale):
            return float(scale <= SEARCH_FLOOR)
        return (scale <= SEARCH_FLOOR).float()
