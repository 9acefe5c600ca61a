"""The data of an evaluation: are they held out, are they prepared like those of the training, and are they left alone?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.labels import where_called

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
    )

    def __init__(self) -> None:
        self._trained: Any = None
        self._shape: tuple[int, ...] = ()
        self._paused_at = -1
        self._pauses = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.batch is None:
            return ()
        if event.kind is EventKind.LOSS:
            if event.phase == "train" and demand.due("eval.inputs_spread", event.step):
                inputs = _inputs(event.batch)
                if inputs is not None:
                    self._trained, self._shape = number(_spread(inputs)), tuple(inputs.shape[1:])
            return ()
        if self._trained is None or event.step == self._paused_at or self._pauses >= PAUSES:
            return ()
        inputs = _inputs(event.batch)
        if inputs is None or tuple(inputs.shape[1:]) != self._shape:
            return ()
        self._paused_at = event.step
        self._pauses += 1
        value = calculate(_apart, number(_spread(inputs)), self._trained)
        return (Sample("eval.inputs_spread", event.step, value, phase="eval"),)


def _inputs(batch: Any) -> Any:
    found = next((t for _, t in named_tensors(batch) if t.is_floating_point() and t.numel() > 1), None)
    return found if found is not None and found.dim() > 1 and found.numel() >= FEWEST else None


def _spread(values: Any) -> Any:
    values = values.detach().flatten()
    return values[:: max(1, -(-values.numel() // MOST_VALUES))].float().std()


def _apart(one: float, other: float) -> float | None:
    return max(one, other) / min(one, other) if min(one, other) > 0 else None


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
