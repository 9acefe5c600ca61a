"""The training loss: of the step, best so far, and against pure guessing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import NO_LABELS, Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.gradients import RecentGradients, loss_facts
from healthcheck.probes.graph import classes_of, why_not_finite
from healthcheck.probes.labels import optimizer_labels
from healthcheck.probes.looks import SeenModules

LOOK_EVERY = 10
"""Steps between two looks whether the model is still the same, for ``loss.chance``."""
FIRST = 5
"""Losses that say where a run began."""
BEFORE, AFTER = 50, 20
"""Losses before and after a resume that are compared."""


class LossProbe:
    """Combines the losses of a step's micro-batches and follows the best of them.

    Micro-batches are added where the trainer divides them itself (``event.loss_weight`` 1.0) and
    averaged otherwise; one non-finite micro-batch makes the step's loss non-finite. The value is
    given out before the update, so that a rule can still keep the update from happening.
    """

    name = "loss"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE, EventKind.STEP_END)
    answers_once = (EventKind.STEP_END,)
    noted = (EventKind.BEFORE_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("loss", "Training loss of the step, over its micro-batches.", cost=Cost.DEVICE),
        Metric("loss.best", "Lowest finite loss so far.", cost=Cost.DEVICE),
        Metric(
            "loss.resumed",
            f"Once after a resume: median of the first {AFTER} losses divided by that of the last {BEFORE} before.",
            needs=("a resume",),
        ),
        Metric(
            "loss.chance",
            "Loss divided by ln(classes) of the last linear layer: 1 is what guessing costs a classifier. Losses that are"
            " seen to be no cross entropy over these classes have none.",
            cost=Cost.DEVICE,
            needs=("a loss over classes",),
        ),
        Metric(
            "loss.start",
            f"Mean of the first {FIRST} losses divided by ln(classes) of their cross entropy: well below 1, the model knew"
            " something before the run. 1 for other losses.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self, gradients: RecentGradients | None = None) -> None:
        self._gradients = gradients or RecentGradients()
        self._open: dict[int, tuple[Any, float, bool, int | None]] = {}
        """Per optimizer: sum and count of losses, whether they are averaged, and their classes (see ``classes_of``)."""
        self._given: dict[int, int] = {}
        self._best: dict[int, float] = {}
        self._recent: deque[float] = deque(maxlen=BEFORE)
        self._saved: float | None = None
        """Median before the resume, until it was compared."""
        self._modules = SeenModules()
        self._width: int | None = None
        """Outputs of the model's last linear layer."""
        self._first: list[float] = []
        """The first losses, each divided by what guessing costs."""
        self._look_at = 0
        self._follows_best = self._follows_start = True
        self._cause = (0, "")
        """What the graph of a non-finite loss showed, and of which step."""
        self._bad_batch: tuple[int, list[tuple[str, Any]]] = (0, [])
        """Step and tensors of the batch of a non-finite loss."""
        self._model: Any = None
        """The view of the model that was trained last."""
        self.events_from = 0
        """Step from which on the graph of the loss is to be seen, where steps are noted in rows."""

    def plan(self, demand: Demand) -> None:
        self._follows_best = demand.wants("loss.best") or demand.wants("loss.resumed")
        self._follows_start = demand.wants("loss.start")

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self._model = event.model
        if event.row is not None:
            self._look(event, event.row, demand)
            return ()
        if event.kind is EventKind.LOSS:
            return self._take(event, demand)
        index = event.optimizer_index
        if event.kind is not EventKind.BEFORE_UPDATE and self._given.get(index) == event.step:
            # What is open now belongs to the next step: with optimizers that take turns, a step is
            # known to be over only when the next loss is there.
            return ()
        # Losses are seen before anybody knows which optimizer will use them: they belong to the
        # optimizer that steps next.
        total = self._open.pop(index, None) or self._open.pop(0, None)
        classes: int | None = None
        if total is not None:
            value, count, averaged, classes = total
            if averaged and count > 1:
                value = value / count
        elif event.kind is EventKind.STEP_END and event.loss is not None:
            value = number(event.loss)
            if value is None:
                return ()
        else:
            return ()
        self._given[index] = event.step
        if type(value) is float and not math.isfinite(value) and event.batch is not None:
            self._bad_batch = event.step, list(named_tensors(event.batch, "batch"))
        width = self._last_width(event) if "loss.chance" in demand.due_now else None
        return self._samples(value, event.step, index, classes, width)

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        settled = self._saved is None and not (self._follows_start and len(self._first) < FIRST)
        for row in rows:
            index, step = row.optimizer_index, row.step
            if row.loss is None or self._given.get(index) == step:
                continue
            self._given[index] = step
            # Passes of the first step that is noted may have been shown by events: the row has their losses.
            shown = self._open.pop(0, None) if self._open else None
            classes, width = row.found.get("loss") or (None if shown is None else shown[3], None)
            time, value = row.update_time if row.seen else row.time, row.loss
            if type(value) is float and width is None and settled and value - value == 0.0:  # nearly always so
                labels = optimizer_labels(index) if index else NO_LABELS
                made.append(Sample("loss", step, value, labels, "train", time, partial(self._facts, step, False, [])))
                if self._follows_best:
                    if index == 0:
                        self._recent.append(value)
                    best = self._best[index] = min(value, self._best.get(index, math.inf))
                    made.append(Sample("loss.best", step, best, labels, time=time))
                continue
            for sample in self._samples(value, step, index, classes, width):
                sample.time = time
                made.append(sample)
        return made

    def _look(self, event: Event, row: StepRow, demand: Demand) -> None:
        """The graph of a loss that is noted in a row."""
        graph, step = event.loss_graph, event.step
        value = row.loss
        if type(value) is float and not math.isfinite(value):
            if event.batch is not None:
                self._bad_batch = step, list(named_tensors(event.batch, "batch"))
            if graph is not None:
                self._cause = (step, why_not_finite(graph))
        begins = self._follows_start and len(self._first) < FIRST
        chance = "loss.chance" in demand.due_now
        if "loss" not in row.found:  # of the first micro-batch
            looked = graph is not None and (begins or chance)
            row.found["loss"] = classes_of(graph) if looked else None, self._last_width(event) if chance else None
        if not begins:
            self.events_from = demand.next_due(("loss.chance",), step)

    def _take(self, event: Event, demand: Demand) -> tuple[()]:
        """The loss of one micro-batch: nothing to say yet."""
        value = number(event.loss)
        if value is None:
            return ()
        graph = event.loss_graph
        # The graph is there now and not later: the cause is noted before anybody asks for it.
        if graph is not None and type(value) is float and not math.isfinite(value):
            self._cause = (event.step, why_not_finite(graph))
        known = self._open.get(event.optimizer_index)
        averaged = event.loss_weight is None
        if event.loss_weight is not None and event.loss_weight != 1.0:
            value = value * event.loss_weight
        if known is not None:
            self._open[event.optimizer_index] = (known[0] + value, known[1] + 1, averaged, known[3])
            return ()
        begins = self._follows_start and len(self._first) < FIRST
        looked = graph is not None and (begins or "loss.chance" in demand.due_now)
        self._open[event.optimizer_index] = (value, 1, averaged, classes_of(graph) if looked else None)
        return ()

    def _samples(self, value: Any, step: int, index: int, classes: int | None, width: int | None) -> list[Sample]:
        """:param width: outputs of the last linear layer, where the loss is to be compared with guessing."""
        labels, here = optimizer_labels(index), type(value) is float
        # The batch only where the answer is given at once: waiting, it would be kept in memory.
        batch = self._bad_batch[1] if here and self._bad_batch[0] == step else []
        detail = None if self._model is None else partial(self._facts, step, not here, batch)
        # What follows is calculated in the order of the steps, wherever the losses come from.
        found: list[tuple[str, Any]] = []
        if self._follows_best:
            found.append(("loss.best", calculate(partial(self._lowest, index), value)))
        if self._saved is not None and index == 0:
            found.append(("loss.resumed", calculate(self._against_before, value)))
        if width is not None and classes in (None, width):
            found.append(("loss.chance", calculate(partial(_per_guess, width), value)))
        if self._follows_start and len(self._first) < FIRST and index == 0:
            found.append(("loss.start", calculate(partial(self._mean_of_first, classes), value)))
        samples = [Sample("loss", step, value, labels, detail=detail)]
        for name, given in found:
            if given is not None:
                samples.append(Sample(name, step, given, labels))
        return samples

    def _facts(self, step: int, late: bool, batch: list[tuple[str, Any]]) -> dict[str, Any]:
        """What a message about the loss of a step may say."""
        cause = self._cause[1] if self._cause[0] == step else ""
        named = self._model.named_parameters()
        return loss_facts(named, self._gradients.of(step), late=late, batch=batch, cause=cause)

    def _lowest(self, index: int, loss: float) -> float | None:
        """The best loss of an optimizer so far, this one included; None before the first that is finite."""
        if math.isfinite(loss):
            if index == 0:
                self._recent.append(loss)
            if loss < self._best.get(index, math.inf):
                self._best[index] = loss
        return self._best.get(index)

    def _against_before(self, loss: float) -> float | None:
        """Once enough losses have come after a resume, their median against that of the losses before it."""
        if self._saved is None or len(self._recent) < AFTER:
            return None
        before, self._saved = self._saved, None
        return statistics.median(self._recent) / before if before > 0 else None

    def _mean_of_first(self, classes: int | None, loss: float) -> float | None:
        if not math.isfinite(loss) or len(self._first) >= FIRST:
            return None
        self._first.append(loss / math.log(classes) if classes is not None and classes > 1 else 1.0)
        return statistics.fmean(self._first)

    def _last_width(self, event: Event) -> int | None:
        """Outputs of the last linear layer, if more than one; looked up once per model."""
        if event.model is None:
            return None
        # Walking through a thousand modules in each step would cost more than the loss.
        if event.step < self._look_at:
            return self._width
        self._look_at = event.step + LOOK_EVERY
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._width = None
            for _, module in modules:
                width = getattr(module, "out_features", None)
                if isinstance(width, int):
                    self._width = width if width > 1 else None
        return self._width

    def state_dict(self) -> dict[str, Any]:
        best = {str(k): v for k, v in self._best.items()}
        return {"best": best, "median": statistics.median(self._recent) if self._recent else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = {int(k): float(v) for k, v in state.get("best", {}).items()}
        self._saved = state.get("median")
        self._recent.clear()


def _per_guess(classes: int, loss: float) -> float | None:
    """A loss against that of guessing among so many classes; one that is not finite is the business of its own rule."""
    return loss / math.log(classes) if math.isfinite(loss) else None
