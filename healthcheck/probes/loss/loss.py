"""The training loss: of the step, best so far, and against pure guessing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.data.batches import named_tensors
from healthcheck.probes.gradients.blame import RecentGradients, loss_facts
from healthcheck.probes.loss.shape import classes_of, why_not_finite
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.transfer.late import Late
from healthcheck.probes.values import on_host, optimizer_labels, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Labels, Metric, Sample

LOOK_EVERY = 10
"""Steps between two looks whether the model is still the same, for ``loss.chance``."""
FIRST = 5
"""Losses that say where a run began."""
BEFORE, AFTER = 50, 20
"""Losses before and after a resume that are compared; only those read on the host."""


class LossProbe:
    """Combines the losses of a step's micro-batches and follows the best of them.

    Micro-batches are added where the trainer divides them itself (``event.loss_weight`` 1.0) and
    averaged otherwise; one non-finite micro-batch makes the step's loss non-finite. The value is
    given out before the update, so that a rule can still keep the update from happening.
    """

    name = "loss"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE, EventKind.STEP_END)
    answers_once = (EventKind.STEP_END,)
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
        self._begun = 0
        self._look_at = 0
        self._follows_best = self._follows_start = True
        self._cause = (0, "")
        """What the graph of a non-finite loss showed, and of which step."""

    def plan(self, demand: Demand) -> None:
        self._follows_best = demand.wants("loss.best")
        self._follows_start = demand.wants("loss.start")

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        index = event.optimizer_index
        if event.kind is EventKind.LOSS:
            self._take(event, demand)
            return ()
        if event.kind is not EventKind.BEFORE_UPDATE and self._given.get(index) == event.step:
            # What is open now belongs to the next step: with optimizers that take turns, a step is
            # known to be over only when the next loss is there.
            return ()
        # Losses are seen before anybody knows which optimizer will use them: they belong to the
        # optimizer that steps next.
        total = self._open.pop(index, None) or self._open.pop(0, None)
        classes: int | None = None
        if total is not None:
            summed, count, averaged, classes = total
            value = summed
            if averaged and count > 1:
                value = summed / count if on_host(summed) else Late(lambda number: number / count, summed)
        elif event.kind is EventKind.STEP_END and event.loss is not None:
            value = scalar(event.loss)
            if value is None:
                return ()
        else:
            return ()
        self._given[index] = event.step
        return self._samples(value, optimizer_labels(index), event, demand, classes)

    def _take(self, event: Event, demand: Demand) -> None:
        value = scalar(event.loss)
        if value is None:
            return
        if event.loss_graph is not None and type(value) is float and not math.isfinite(value):
            self._cause = (event.step, why_not_finite(event.loss_graph))
        known = self._open.get(event.optimizer_index)
        averaged = event.loss_weight is None
        weight = 1.0 if event.loss_weight is None else event.loss_weight
        if weight != 1.0:
            value = value * weight
        if known is None:
            looked = event.loss_graph is not None and (self._begins() or "loss.chance" in demand.due_now)
            classes = classes_of(event.loss_graph) if looked else None
            self._open[event.optimizer_index] = (value, 1, averaged, classes)
        else:
            self._open[event.optimizer_index] = (known[0] + value, known[1] + 1, averaged, known[3])

    def _begins(self) -> bool:
        return self._follows_start and self._begun < FIRST

    def _samples(self, value: Any, labels: Labels, event: Event, demand: Demand, classes: int | None) -> list[Sample]:
        model, step, gradients = event.model, event.step, self._gradients
        here = on_host(value)
        detail: Callable[[], dict[str, Any]] | None = None
        if model is not None:
            # The batch only where the answer is given at once: a letter would keep it in memory.
            batch = list(named_tensors(event.batch, "batch")) if here and not math.isfinite(value) else []
            cause = self._cause[1] if self._cause[0] == step else ""

            def detail() -> dict[str, Any]:
                return loss_facts(model.named_parameters(), gradients.of(step), late=not here, batch=batch, cause=cause)

        samples = [Sample("loss", step, value, labels, detail=detail)]
        if self._follows_best:
            best = self._better(event.optimizer_index, value)
            if best is not None:
                samples.append(Sample("loss.best", step, best, labels))
        if event.optimizer_index == 0 and here and math.isfinite(value):
            self._recent.append(value)
            if self._saved is not None and len(self._recent) >= AFTER:
                before, self._saved = self._saved, None
                if before > 0:
                    samples.append(Sample("loss.resumed", step, statistics.median(self._recent) / before, labels))
        lost = here and not math.isfinite(value)  # the rule on the loss itself says so
        if "loss.chance" in demand.due_now and not lost:
            width = self._last_width(event)
            if width is not None and classes in (None, width):
                samples.append(Sample("loss.chance", step, _derived(value, partial(_per_guess, width)), labels))
        if self._begins() and event.optimizer_index == 0 and not lost:
            self._begun += 1
            samples.append(Sample("loss.start", step, _derived(value, partial(self._mean_of_first, classes)), labels))
        return samples

    def _mean_of_first(self, classes: int | None, number: float) -> float:
        self._first.append(_per_guess(classes, number) if classes is not None and classes > 1 else 1.0)
        return statistics.fmean(self._first)

    def _better(self, index: int, value: Any) -> Any:
        if not on_host(value):  # computed in the order of the steps, when the losses have arrived
            return _derived(value, lambda number: self._lowest(index, number))
        best = self._lowest(index, value)
        return best if math.isfinite(best) else None

    def _lowest(self, index: int, value: float) -> float:
        best = self._best.get(index, math.inf)
        if math.isfinite(value) and value < best:
            best = self._best[index] = value
        return best

    def _last_width(self, event: Event) -> int | None:
        """Outputs of the last linear layer, if more than one; looked up once per model."""
        if event.model is None:
            return None
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


def _per_guess(classes: int, number: float) -> float:
    return number / math.log(classes)


def _derived(value: Any, compute: Callable[[float], float]) -> Any:
    """``compute`` of a number that is there, or that will be."""
    if isinstance(value, Late):
        return Late(lambda *numbers: compute(value.finish(list(numbers))), *value.parts)
    return compute(value) if on_host(value) else Late(compute, value)
