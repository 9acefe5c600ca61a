"""Signs of life and of updates: heartbeat, micro-batches, updates that never come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.transfer.deferred import calculate, number
from healthcheck.probes.transfer.sampling import strided_view
from healthcheck.probes.transfer.tensors import evenly, local_part, no_grad
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Metric, Sample

TENSORS = 8
"""Tensors looked at, spread over the model: a script may train one end of it only."""
PER_TENSOR = 16
"""Elements of each."""


class HandUpdates:
    """Compares weights that have gradients with what they were at the look before.

    Only for loops whose optimizer never steps: ``p.data.add_(p.grad, alpha=-lr)`` is training, too, and torch
    announces it neither by a hook nor by the version number of ``p``.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []
        """Each tensor, by weak reference, with its elements at the look before."""

    def changed(self, model: Any) -> Any:
        """Whether any of them changed since the last call.

        :param model: a :class:`healthcheck.protocols.ModelView`, just after a backward pass.
        :returns: 1 or 0, deferred where the weights are on a device; None if no weight has a gradient, so that there is
            nothing to apply.
        """
        there = [p for _, p in model.named_parameters() if p.grad is not None]
        if not there:
            return None
        # The last one always: who trains a head by hand trains the end of the model.
        chosen = [*evenly(there, TENSORS - 1), there[-1]]
        before, known = self._before, {id(tensor()): values for tensor, values in self._before}
        with no_grad():
            present = [(p, strided_view(local_part(p), PER_TENSOR).clone()) for p in dict.fromkeys(chosen)]
            self._before = [(weak(p), values) for p, values in present]
            # A NaN differs from itself, and would pass for a change.
            hits = [
                ((values != known[id(p)]) & (values == values)).any()
                for p, values in present
                if id(p) in known and known[id(p)].shape == values.shape
            ]
            if not hits:
                return float(bool(before))  # other tensors than before: the script made new ones
            found = hits[0]
            for hit in hits[1:]:
                found = found | hit.to(found.device)
            return number(found)


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
    counts backward passes, because nothing ever steps) was not: there the weights decide. A loop that changes them by
    hand trains, and one whose gradients reach no weight has nothing to apply.
    """

    name = "step-count"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("micro_batches", "Losses of the step: one for each backward pass, or the one that the loop tells."),
        Metric("updates.missing", "Backward passes since the last attempted update, or change of the weights."),
    )

    def __init__(self) -> None:
        self._passes = 0
        """Backward passes of the present step."""
        self._missing = 0.0
        """Backward passes of earlier steps whose update has not come."""
        self._by_hand: HandUpdates | None = None
        self._counts_passes = True

    def plan(self, demand: Demand) -> None:
        self._counts_passes = demand.wants("micro_batches")

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._passes += 1
            return ()
        passes, self._passes = self._passes, 0
        changed: Any = 0.0
        if event.optimizer is not None or event.skipped is not None:
            self._missing, self._by_hand = 0.0, None
            missing: Any = 0.0
        else:
            if event.model is not None:
                self._by_hand = self._by_hand or HandUpdates()
                changed = self._by_hand.changed(event.model)
            missing = calculate(partial(self._count, passes), 0.0 if changed is None else changed)
        samples = [Sample("updates.missing", event.step, missing)] if changed is not None else []
        if passes and self._counts_passes:
            samples.append(Sample("micro_batches", event.step, float(passes)))
        return samples

    def _count(self, passes: int, changed: float) -> float:
        """One step more without an optimizer: where the weights changed since the step before, what was missing has
        come, and only the pass just made waits for its update."""
        self._missing = 1.0 if changed else self._missing + passes
        return self._missing
