"""Updates that were not applied: thrown away by loss scaling in mixed precision, or held back by a rule."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.labels import optimizer_labels
from healthcheck.probes.looks import ask_again
from healthcheck.probes.transfer.deferred import calculate, number, where
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
        self._streak: dict[int, float] = {}
        self._applied: set[int] = set()
        """Optimizers that have made an update: their scaler's search for a first scale is over."""
        self._given: dict[int, int] = {}
        """Step for which ``amp.skipped`` was given before the update, by optimizer."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        scale = number(event.loss_scale)
        if event.kind is EventKind.BEFORE_UPDATE:
            if scale is None:
                return ()
            # So that rules on its gradients know whether this update will be applied, before they judge them. A scaler
            # that drives a fused optimizer leaves the decision to it: `found_inf` is on the device. Any other has
            # looked already, and would not have called the optimizer.
            found = getattr(event.optimizer, "found_inf", None)
            self._given[event.optimizer_index] = event.step
            return self._skipped(event, 0.0 if found is None else number(found), scale)
        if scale is None and not event.skipped:
            if event.optimizer is not None:
                self._applied.add(event.optimizer_index)
                self.rests_until = ask_again(event.step)
            return ()
        samples = []
        if scale is not None:
            samples.append(Sample("amp.scale", event.step, scale, optimizer_labels(event.optimizer_index)))
        if event.skipped is not None and self._given.get(event.optimizer_index) != event.step:
            samples += self._skipped(event, float(event.skipped), scale)
        return samples

    def _skipped(self, event: Event, skipped: Any, scale: Any) -> list[Sample]:
        index, labels = event.optimizer_index, optimizer_labels(event.optimizer_index)
        # Counted in the order of the steps, wherever the decision is made.
        streak = calculate(partial(self._in_a_row, index), skipped, SEARCH_FLOOR if scale is None else scale)
        return [
            Sample("amp.skipped", event.step, where(skipped > 0.0, 1.0, 0.0), labels),
            Sample("amp.skipped_streak", event.step, streak, labels),
        ]

    def _in_a_row(self, index: int, skipped: float, scale: float) -> float:
        if skipped > 0.0:
            # GradScaler begins at 65536 and halves until gradients are finite: no fault, and no streak.
            searching = scale > SEARCH_FLOOR and index not in self._applied
            self._streak[index] = self._streak.get(index, 0.0) + (0.0 if searching else 1.0)
        else:
            self._applied.add(index)
            self._streak[index] = 0.0
        return self._streak[index]


class SkippedUpdateProbe:
    """Counts updates that were kept from the weights. Gives nothing where no rule may do that."""

    name = "skipped-updates"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.skipped",
            "1 if a rule kept this update from being applied, else 0.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
        Metric(
            "updates.skipped_streak",
            "Updates in a row that rules kept from being applied.",
            cost=Cost.DEVICE,
            needs=("gate",),
        ),
    )

    def __init__(self) -> None:
        self._streak: dict[int, float] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.held_back:
            return ()
        step = event.step
        samples: list[Sample] = []
        for index, given in event.held_back.items():
            flag, labels = given if type(given) is float else number(given), optimizer_labels(index)
            streak = calculate(partial(self._count, index), flag)
            samples.append(Sample("updates.skipped", step, flag, labels))
            samples.append(Sample("updates.skipped_streak", step, streak, labels))
        return samples

    def _count(self, index: int, flag: float) -> float:
        self._streak[index] = self._streak.get(index, 0.0) + 1.0 if flag else 0.0
        return self._streak[index]
