"""What became of each update: that it was made, skipped by a loss scale, or held back by a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, where
from healthcheck.device.sampling import strided_view
from healthcheck.device.tensors import evenly, local_part, no_grad
from healthcheck.probes.labels import optimizer_labels, where_called
from healthcheck.probes.looks import ask_again

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

        :param model: a :class:`healthcheck.core.protocols.ModelView`, just after a backward pass.
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
    noted = (EventKind.LOSS, EventKind.STEP_END)
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

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made = []
        for row in rows:
            # The clock of events reads `time.monotonic`, too.
            last, step = self._last - row.origin, row.step
            for at in (*row.passes, row.time) if row.ends else row.passes:
                if at - last >= OFTEN:
                    last, self._last = at, at + row.origin
                    made.append(Sample("heartbeat", step, 1.0, time=at))
        return made


class StepCountProbe:
    """Counts backward passes against attempted updates.

    A step that a ``GradScaler`` skips was attempted. A step end without optimizer (a trainer that
    counts backward passes, because nothing ever steps) was not: there the weights decide. A loop that changes them by
    hand trains, and one whose gradients reach no weight has nothing to apply.
    """

    name = "step-count"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.STEP_END)
    noted = listens_to
    provides: tuple[Metric, ...] = (
        Metric("micro_batches", "Losses of the step: one for each backward pass, or the one that the loop reports."),
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
        place = {} if event.optimizer is not None else where_called(event, "backward")
        detail = (lambda: place) if place else None  # not the event: it holds on to the model
        samples = [Sample("updates.missing", event.step, missing, detail=detail)] if changed is not None else []
        if passes and self._counts_passes:
            samples.append(Sample("micro_batches", event.step, float(passes)))
        return samples

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made = []
        for row in rows:
            self._passes += len(row.passes)
            if not row.ends:
                continue
            passes, self._passes = self._passes, 0
            if row.attempted or row.skipped is not None:  # else only the weights could say
                self._missing, self._by_hand = 0.0, None
                made.append(Sample("updates.missing", row.step, 0.0, time=row.time))
            if passes and self._counts_passes:
                made.append(Sample("micro_batches", row.step, float(passes), time=row.time))
        return made

    def _count(self, passes: int, changed: float) -> float:
        """One step more without an optimizer: where the weights changed since the step before, what was missing has
        come, and only the pass just made waits for its update."""
        self._missing = 1.0 if changed else self._missing + passes
        return self._missing


# --------------------------------------------------------------------------------------------------
# Updates that were not applied: thrown away by loss scaling in mixed precision, or held back by a rule.


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


_MADE = {0: 0.0}
"""Of the only optimizer of a step, whose update was not held back."""


class SkippedUpdateProbe:
    """Counts updates that were kept from the weights. Gives nothing where no rule may do that."""

    name = "skipped-updates"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    noted = listens_to
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
        self._given = -1
        """The last step of which something was said: an event and a row may both show it."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not event.held_back or event.step == self._given:
            return ()
        self._given = event.step
        return self._samples(event.step, event.held_back, 0.0)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            held_back = row.held_back
            if not held_back or row.step == self._given:
                continue
            self._given = row.step
            if held_back == _MADE and not self._streak.get(0):  # nearly always so
                made.append(Sample("updates.skipped", row.step, 0.0, time=row.time))
                made.append(Sample("updates.skipped_streak", row.step, 0.0, time=row.time))
            else:
                made += self._samples(row.step, held_back, row.time)
        return made

    def _samples(self, step: int, held_back: Mapping[int, Any], time: float) -> list[Sample]:
        samples: list[Sample] = []
        for index, given in held_back.items():
            flag, labels = given if type(given) is float else number(given), optimizer_labels(index)
            streak = calculate(partial(self._count, index), flag)
            samples.append(Sample("updates.skipped", step, flag, labels, time=time))
            samples.append(Sample("updates.skipped_streak", step, streak, labels, time=time))
        return samples

    def _count(self, index: int, flag: float) -> float:
        self._streak[index] = self._streak.get(index, 0.0) + 1.0 if flag else 0.0
        return self._streak[index]
