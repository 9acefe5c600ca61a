"""Signs of life and of updates: heartbeat, micro-batches, updates that never come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.values import scalar
from healthcheck.probes.weights.byhand import HandUpdates
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

OFTEN = 0.2
"""Seconds in which one sign of life is enough."""


class HeartbeatProbe:
    """Says 1 whenever the run shows that it lives: training, evaluation, saving.

    One event of each phase of a step is enough, and one in a fifth of a second; the rest would only repeat it.
    """

    name = "heartbeat"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.EPOCH_START,
        EventKind.LOSS,
        EventKind.STEP_END,
        EventKind.EVAL_START,
        EventKind.EVAL_STEP,
        EventKind.EVAL_END,
        EventKind.TEST_START,
        EventKind.TEST_STEP,
        EventKind.TEST_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("heartbeat", "1 at every sign of life: a step, an evaluation batch, a checkpoint."),
    )

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        now = self._clock()
        if now - self._last < OFTEN:
            return ()
        self._last = now
        return (Sample("heartbeat", event.step, 1.0, phase=event.phase),)


class StepCountProbe:
    """Counts backward passes against attempted updates.

    A step that a ``GradScaler`` skips was attempted. A step end without optimizer (a trainer that
    counts backward passes, because nothing ever steps) was not: there the weights tell. A loop that changes them by
    hand trains, and one whose gradients reach no weight has nothing to apply.
    """

    name = "step-count"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("micro_batches", "Losses of the step: one for each backward pass, or the one that the loop tells."),
        Metric("updates.missing", "Backward passes since the last attempted update, or change of the weights."),
    )

    def __init__(self) -> None:
        self._since_step = 0
        self._since_update: Any = 0
        self._by_hand: HandUpdates | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._since_step += 1
            self._since_update += 1
            return ()
        known = True
        if event.optimizer is not None or event.skipped is not None:
            self._since_update, self._by_hand = 0, None
        elif event.model is not None:
            known = self._look_at_weights(event.model)
        count, self._since_step = self._since_step, 0
        samples = [Sample("updates.missing", event.step, scalar(self._since_update))] if known else []
        if count and demand.wants("micro_batches"):
            samples.append(Sample("micro_batches", event.step, float(count)))
        return samples

    def _look_at_weights(self, model: Any) -> bool:
        """Count anew where the weights changed since the pass before. False if no gradient reaches a known weight."""
        self._by_hand = self._by_hand or HandUpdates()
        changed = self._by_hand.changed(model)
        if changed is None:
            return False
        if hasattr(changed, "detach"):
            # What is on a device stays there; the pass just made waits for its update.
            self._since_update = (~changed) * (self._since_update - 1) + 1
        elif changed:
            self._since_update = 1
        return True
