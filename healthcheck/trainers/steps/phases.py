"""Evaluation pauses of a script that announces none, and the metrics that it logs itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.events import Event, EventKind
from healthcheck.names import canonical_metric, is_evaluation

if TYPE_CHECKING:
    from healthcheck.trainers.steps.count import StepCount


class Phases:
    """An evaluation begins when the trained model is set to evaluation mode, or when batches are
    drawn without gradients; it ends with the next backward pass, or with the run.

    Evaluation results that the script logs are collected and handed out at that end.
    """

    def __init__(self, steps: StepCount) -> None:
        self._steps = steps
        self._metrics: dict[str, Any] = {}
        self._training_data: weakref.ref[Any] | None = None
        self.evaluating = False
        self.told = False
        """True while a framework announces its evaluations itself: then nothing is guessed here."""

    def draws_for_training(self, dataset: Any, *, gradients: bool) -> bool:
        """Whether a batch of ``dataset`` is to be trained on, as far as can be told."""
        if self.told:
            return gradients and not self.evaluating
        if not gradients:
            return False
        if self.evaluating:
            known = self._training_data() if self._training_data is not None else None
            if dataset is not known or not all(root.training for root in self._steps.view.roots()):
                return False
            self.end()
        with contextlib.suppress(TypeError):  # a list is a dataset, too
            self._training_data = weakref.ref(dataset)
        return True

    def begin(self) -> None:
        """Start a pause, unless there is one or training has not begun."""
        if not self.told and not self.evaluating and self._steps.started:
            self.evaluating = True
            self._emit(EventKind.EVAL_START)

    def batch(self) -> None:
        """One batch of an evaluation was drawn."""
        if self.told:
            return
        self.begin()
        if self.evaluating:
            self._emit(EventKind.EVAL_STEP)

    def end(self) -> None:
        """Hand out what was collected. Called at the next backward pass and at the end."""
        if self.told:
            return
        if self.evaluating or self._metrics:
            metrics, self._metrics = self._metrics, {}
            self.evaluating = False
            self._emit(EventKind.EVAL_END, metrics=metrics or None)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Metrics that the script gave to its own logger, under its own names."""
        session = self._steps.session
        training: dict[str, Any] = {}
        for given, value in metrics.items():
            name = canonical_metric(given)
            if self.told and (is_evaluation(name) or name.startswith("test.")):
                continue  # the framework has handed them out, under their data sets
            if is_evaluation(name):
                if name in self._metrics:  # a second round without a step between
                    self.end()
                self._metrics[name] = value
            elif name not in session.host.registry.metrics:  # we measure those ourselves, unfiltered
                training[name] = value
        if training:
            session.log(training)

    def _emit(self, kind: EventKind, metrics: Mapping[str, Any] | None = None) -> None:
        steps = self._steps
        if steps.session.wants(kind):
            event = Event(kind, max(1, steps.last_attempt), phase="eval", model=steps.view, metrics=metrics)
            steps.session.emit(event)
