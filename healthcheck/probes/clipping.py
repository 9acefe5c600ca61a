"""What a loop does to gradients before the update: how often and how hard it clips, which it leaves out; loss scaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, minimum, number, where
from healthcheck.probes.labels import in_groups, optimizer_labels, where_called
from healthcheck.probes.looks import ask_again


class ClippingProbe:
    """Compares the loop's own norm with its threshold. A loop that does not clip gives nothing."""

    name = "clipping"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE, EventKind.STEP_END)
    noted = listens_to
    rows_with = "max_norm"
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
            # Only at the end of the step is it sure that no clipping will come.
            if event.kind is EventKind.STEP_END:
                self.rests_until = ask_again(event.step)
            return ()
        if event.kind is EventKind.BEFORE_UPDATE and event.clipped_scaled is not None and event.loss_scale is not None:
            labels = optimizer_labels(event.optimizer_index)
            return [
                Sample("clip.scaled", event.step, float(event.clipped_scaled), labels),
                *self._how_hard(event),
            ]
        return self._how_hard(event)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        for row in rows:
            if row.max_norm is None:
                continue
            time = row.update_time if row.seen else row.time
            if row.over and row.clipped_scaled is not None and row.loss_scale is not None and row.seen:
                labels = optimizer_labels(row.optimizer_index)
                made.append(Sample("clip.scaled", row.step, float(row.clipped_scaled), labels, time=time))
            for sample in self._how_hard(row):
                sample.time = time
                made.append(sample)
        return made

    def _how_hard(self, event: Event | StepRow) -> Iterable[Sample]:
        index = event.optimizer_index
        if event.skipped or self._given.get(index) == event.step:
            return ()
        norm, limit = number(event.grad_norm), event.max_norm
        if norm is None or limit is None:
            return ()
        self._given[index] = event.step
        step, labels = event.step, optimizer_labels(index)
        if type(norm) is float:  # nearly always on a host, and each call costs
            ratio = limit / (norm + 1e-6)
            return [
                Sample("clip.applied", step, 1.0 if norm > limit else 0.0, labels),
                Sample("clip.ratio", step, 1.0 if ratio >= 1.0 else ratio, labels),
            ]
        return [
            Sample("clip.applied", step, where(norm > limit, 1.0, 0.0), labels),
            Sample("clip.ratio", step, minimum(1.0, limit / (norm + 1e-6)), labels),
        ]


AGAIN = 500
"""Steps after which a loop that clips everything is looked at again."""


class UnclippedGradientProbe:
    """Counts elements with a gradient whose tensors were not among those that the loop clipped for the update.

    All of them, where the loop clips before the backward pass, after the update, or a list without parameters, as a
    generator is that was used up before. Looks at lists, never at values.
    """

    name = "unclipped-gradients"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "clip.missed",
            "Part of the elements with a gradient, of those that an update applies, that the loop's clipping left out.",
            "fraction",
            Cost.HOST,
            needs=("clipping",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None or not demand.due("clip.missed", event.step):
            return ()
        if event.clipped is None:
            self.rests_until = ask_again(event.step)
            return ()
        clipped = set(map(id, event.clipped))
        own = [p for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None]
        left_out = [p for p in own if id(p) not in clipped]
        count = sum(p.numel() for p in own)
        if not count:
            return ()
        # Which parameters a loop clips hardly ever changes while it runs.
        if not left_out:
            self.rests_until = event.step + AGAIN
        clips_nothing = not event.clipped
        model = event.model
        place = where_called(event, "clip")

        def facts() -> Mapping[str, Any]:
            if clips_nothing:
                return {"why": "it is called before the backward pass, after the update, or without parameters"} | place
            names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
            every = [names.get(id(p), "?") for p in own]
            return {"left out": in_groups([names.get(id(p), "?") for p in left_out], every)} | place

        part = sum(p.numel() for p in left_out) / count
        labels = optimizer_labels(event.optimizer_index)
        return (Sample("clip.missed", event.step, part, labels, detail=facts),)


class MicroBatchClippingProbe:
    """Counts how often each gradient was clipped for one update, beside the backward passes of that update.

    With accumulated gradients a clipping after each pass shrinks what earlier passes left again and again, so that the last
    ones weigh most. It counts only where all that was clipped was so once for every pass.
    """

    name = "micro-batch-clipping"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "clip.per_pass",
            "How often the gradients of an update were clipped, if after each of several backward passes; else 0.",
            cost=Cost.HOST,
            needs=("clipping",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._passes = (0, 0)
        """Of the step at hand: its number, and its backward passes so far."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not demand.due("clip.per_pass", event.step):
            return ()
        step, passes = self._passes
        if event.kind is EventKind.LOSS:
            self._passes = event.step, passes + 1 if step == event.step else 1
            return ()
        if event.optimizer is None or event.optimizer_index > 0:
            return ()
        if event.clipped is None:
            self.rests_until = ask_again(event.step)
            return ()
        times = Counter(map(id, event.clipped)).values()
        each = step == event.step and passes > 1 and bool(times) and min(times) == max(times) == passes
        place = where_called(event, "clip")
        return (Sample("clip.per_pass", event.step, float(passes if each else 0), detail=lambda: place),)


# --------------------------------------------------------------------------------------------------
# Loss scaling in mixed precision: updates that it throws away.


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
                # The end of a step is shown of its last optimizer alone.
                self.rests_until = ask_again(event.step) if event.optimizer_index in self._applied else 0
                self._applied.add(event.optimizer_index)
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
