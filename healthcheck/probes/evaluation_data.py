"""The data of an evaluation: are they held out, are they prepared like those of the training, and are they left alone?"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.labels import first_few, where_called
from healthcheck.probes.loaders import marks

PAUSES = 8
"""Evaluations whose first batch is compared with the training's."""
FEWEST = 256
"""Values of a batch from which its spread is judged."""
MOST_VALUES = 65_536
"""Values of a batch that are read, at even distances."""
IN_A_ROW = 3
"""Updates in a row on batches of an evaluation that are more than a trial."""


class HeldOutRowsProbe:
    """Which part of the evaluated rows are trained on, as the loaders' data sets show it.

    The same data set, two subsets of one that overlap, slices of one tensor that do. Who looks at the training data in
    evaluation mode as well has a held-out set beside it: the least of all sets so far counts.
    """

    name = "held-out-rows"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_END,)
    only_with = "trained_share"
    provides: tuple[Metric, ...] = (
        Metric(
            "eval.trained_rows",
            "Part of the evaluated rows that are trained on too, of the evaluated set with the fewest so far.",
            "fraction",
            Cost.HOST,
            needs=("evaluation", "a batch from a loader"),
        ),
    )

    def __init__(self) -> None:
        self._least = 1.0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.trained_share is None:
            return ()
        self._least = min(self._least, event.trained_share)
        return (Sample("eval.trained_rows", event.step, self._least, phase="eval"),)


_OF_DATA = frozenset(("eval.inputs_spread", "eval.targets_apart"))


class EvaluationScaleProbe:
    """Compares the spread of the inputs of an evaluation with that of the training's.

    Normalised for one and not for the other they differ several times over. Inputs are the first floating-point tensor of a
    batch from a loader, of the same shape but for the number of rows.
    """

    name = "evaluation-scale"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.EVAL_STEP)
    only_when_due = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "eval.inputs_spread",
            "Standard deviation of an evaluation's inputs and of the training's: the larger divided by the smaller.",
            cost=Cost.DEVICE,
            needs=("evaluation", "a batch from a loader"),
        ),
        Metric(
            "eval.targets_apart",
            "How far the mean of an evaluation's targets, and their spread, are from those of the training's targets, in standard"
            " deviations of these.",
            cost=Cost.DEVICE,
            needs=("evaluation", "a batch from a loader", "targets that are numbers"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._trained: Any = None
        self._targets: dict[str, Any] = {}
        """Mean and spread of the training's targets, by their place in a batch."""
        self._shape: tuple[int, ...] = ()
        self._paused_at = -1
        self._pauses = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.batch is None:
            return ()
        if event.kind is EventKind.LOSS:
            if event.phase == "train" and _OF_DATA & demand.due_now:
                inputs = _inputs(event.batch)
                if inputs is not None:
                    self._trained, self._shape = number(_spread(inputs)), tuple(inputs.shape[1:])
                self._targets = {
                    name: (number(t.detach().float().mean()), number(_spread(t))) for name, t in _targets(event.batch)
                }
            return ()
        if event.step == self._paused_at or self._pauses >= PAUSES:
            return ()
        found = []
        inputs = _inputs(event.batch)
        if self._trained is not None and inputs is not None and tuple(inputs.shape[1:]) == self._shape:
            value = calculate(_apart, number(_spread(inputs)), self._trained)
            found.append(Sample("eval.inputs_spread", event.step, value, phase="eval"))
        for name, targets in _targets(event.batch):
            if name in self._targets:
                own = number(targets.detach().float().mean()), number(_spread(targets))
                value = calculate(_targets_apart, *own, *self._targets[name])
                found.append(Sample("eval.targets_apart", event.step, value, phase="eval"))
                break
        if found:
            self._paused_at = event.step
            self._pauses += 1
            if self._pauses >= PAUSES:
                self.rests_until = sys.maxsize
        return found


def _inputs(batch: Any) -> Any:
    found = next((t for _, t in named_tensors(batch) if t.is_floating_point() and t.numel() > 1), None)
    return found if found is not None and found.dim() > 1 and found.numel() >= FEWEST else None


FEWEST_TARGETS = 32
"""Targets of a batch from which on their mean and spread are judged."""


def _targets(batch: Any) -> list[tuple[str, Any]]:
    """Floating-point tensors of a batch behind the first one, with their places: one that has few values is no picture."""
    found = [(name, t) for name, t in named_tensors(batch) if t.is_floating_point() and t.numel() > 1]
    return [(name, t) for name, t in found[1:] if t.numel() >= FEWEST_TARGETS and t.numel() <= MOST_VALUES]


def _targets_apart(mean: float, spread: float, trained_mean: float, trained_spread: float) -> float | None:
    """The larger of the two differences; a spread that is smaller counts by its quotient, as one that is larger does."""
    if not trained_spread > 0 or not spread > 0:
        return None
    return max(abs(mean - trained_mean) / max(trained_spread, spread), spread / trained_spread, trained_spread / spread)


def _spread(values: Any) -> Any:
    values = values.detach().flatten()
    return values[:: max(1, -(-values.numel() // MOST_VALUES))].float().std()


def _apart(one: float, other: float) -> float | None:
    return max(one, other) / min(one, other) if min(one, other) > 0 else None


class AugmentedEvaluationProbe:
    """Counts evaluations in a row that began with the labels of the one before, and with other inputs.

    The same rows in the same order, and each time with other values: what is drawn at random for the training, noise, flips, crops,
    is drawn for the evaluation as well, as where both are parts of one data set. Only labels that are classes say which rows came.
    Batches on the host are read.
    """

    name = "augmented-evaluation"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_STEP,)
    provides: tuple[Metric, ...] = (
        Metric(
            "eval.inputs_changed",
            "Evaluations in a row whose first batch had the labels of the one before, in their order, and other inputs.",
            cost=Cost.HOST,
            needs=("evaluation", "a batch from a loader", "labels that are classes"),
        ),
    )

    def __init__(self) -> None:
        self._paused_at = -1
        self._pauses = self._row = 0
        self._before: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.batch is None or event.step == self._paused_at or self._pauses >= PAUSES:
            return ()
        self._paused_at = event.step
        self._pauses += 1
        tensors = named_tensors(event.batch)
        labels = marks([t for _, t in tensors if t.dim() == 1 and not t.is_floating_point()])
        inputs = marks([t for _, t in tensors if t.dim() > 1 and t.is_floating_point()])
        if not labels or not inputs:
            return ()
        same = labels == self._before[0] and inputs.isdisjoint(self._before[1])
        self._row = self._row + 1 if same else 0
        self._before = labels, inputs
        place = where_called(event, "eval")
        return (Sample("eval.inputs_changed", event.step, float(self._row), phase="eval", detail=lambda: place),)


LEAST_ROWS = 10
"""Rows of a class from which on its answers count."""


class RenumberedClassProbe:
    """How many more of an evaluation's answers would be right if its classes were numbered otherwise.

    A model that answers one label nearly always by another class, and another label by yet another one, knows the classes: they
    have other numbers than in training (a mapping that is made anew for each set, labels that begin at 1, two classes swapped).
    0 where two labels are mostly answered by the same class, as an untrained model does.
    """

    name = "renumbered-classes"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_END,)
    only_with = "label_counts"
    provides: tuple[Metric, ...] = (
        Metric(
            "eval.renumbered",
            "Part of an evaluation's answers that would be right, and are not, if its classes were numbered otherwise.",
            "fraction",
            Cost.DEVICE,
            needs=("evaluation", "a cross entropy"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        table = event.label_counts
        if table is None or table.dim() < 2 or len(table) < 2:
            return ()
        rows = table.sum(1)
        known = rows >= LEAST_ROWS
        best, answer = table.max(1)
        # Each class that is known is mostly answered by a class of its own; the others share a place behind the last.
        taken = table.new_zeros(len(table)).index_add_(0, answer, known.to(table.dtype))
        apart = (taken <= 1).all() & (known.sum() >= 2)
        right, renumbered = (table.diagonal() * known).sum(), (best * known).sum()
        value = number((renumbered - right) / table.sum().clamp(min=1) * apart)
        place = where_called(event, "loader") or where_called(event, "eval")

        def facts() -> Mapping[str, Any]:
            moved = [f"{k} as {int(a)}" for k, a in enumerate(answer.tolist()) if bool(known[k]) and int(a) != k]
            return {"answered": first_few(moved)} | place

        return (Sample("eval.renumbered", event.step, value, phase="eval", detail=facts),)


class TrainedOnEvaluationProbe:
    """Counts updates in a row that were made in evaluation mode, on batches of another data set than the training's.

    A validation loop that was copied from the training loop, with ``backward()`` and ``step()``. An attack on the inputs in
    an evaluation makes passes as well, and no updates between them.
    """

    name = "trained-on-evaluation"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.on_evaluation_data",
            "Updates in a row on batches that were drawn in evaluation mode from another data set than that trained on.",
            cost=Cost.HOST,
            needs=("a batch from a loader",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is None or event.optimizer_index > 0 or not demand.due("updates.on_evaluation_data", event.step):
            return ()
        steps = list(event.run.trained_on_evaluation)
        most = row = 0
        for before, after in itertools.pairwise(steps):
            row = row + 1 if after == before + 1 else 0
            most = max(most, row + 1)
        place = where_called(event, "eval")

        def facts() -> Mapping[str, Any]:
            return place

        value = float(most if most >= IN_A_ROW else 0)
        return (Sample("updates.on_evaluation_data", event.step, value, detail=facts if value else None),)
