"""Pauses in which a script evaluates its model, and the metrics that it logs itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.names import canonical_metric, is_evaluation
from healthcheck.instrument.data import shared_rows, tensors_of
from healthcheck.instrument.evaluation_dropout import EvaluationDropout
from healthcheck.instrument.heldout import HeldOutLosses
from healthcheck.instrument.modelview import FoundModel

if TYPE_CHECKING:
    from healthcheck.run.session import Session


SETS = 8
"""Data sets of one pause that are compared with the training data at most."""


class Evaluations:
    """Pauses of training in which a script evaluates its model, and the metrics that it logs itself.

    Where nobody announces them, a pause begins when the trained model is set to evaluation mode, or when batches are
    drawn without gradients; it ends with the next backward pass, or with the run. Evaluation results that the script
    logs are collected and handed out at that end; a loss that it does not log is inferred from what it computed.

    :param started: whether training has begun.
    :param step: the step that a pause belongs to.
    :param batch: the batch that is trained on.
    """

    def __init__(
        self,
        session: Session,
        view: FoundModel,
        *,
        started: Callable[[], bool],
        step: Callable[[], int],
        batch: Callable[[], Any],
    ) -> None:
        self._session = session
        self._view = view
        self._started = started
        self._step = step
        self._metrics: dict[str, Any] = {}
        self._training_data: weakref.ref[Any] | None = None
        self.heldout = HeldOutLosses(
            evaluating=self._evaluates,
            batch=lambda: tensors_of(batch()),
            drawn_from=lambda: None if self._training_data is None else self._training_data(),
            wanted=lambda: session.wants(EventKind.EVAL_END),
            wants_labels=lambda: session.board.reads(EventKind.EVAL_END, "label_counts"),
            training=self._in_train_mode,
            in_train_mode=self._loss_in_train_mode,
        )
        self.dropout = EvaluationDropout(
            wanted=lambda: session.board.reads(EventKind.EVAL_END, "dropping"),
            is_trained=self._is_trained,
        )
        self.evaluating = False
        self.announced = False
        """True while a framework announces its evaluations itself: then nothing is guessed here."""
        self.open = False
        """Whether :meth:`end` has something to do."""
        self._evaluated: list[weakref.ref[Any]] = []
        """Data sets that were drawn from in this pause."""

    def _loss_in_train_mode(self, place: str) -> None:
        """Losses were computed without gradients in train mode, first at this place of the script."""
        facts = self._session.facts
        facts.losses_in_train_mode.append(self._step())
        facts.places.note_call("loss_in_train_mode", place)

    def announce(self, announced: bool) -> None:
        """From now on a framework says when it evaluates, or does so no longer."""
        self.announced = announced
        self._note_open()

    def announced_begin(self) -> bool:
        """A framework begins a pause. False if one has begun already."""
        if self.evaluating:
            return False
        self.evaluating = True
        self.dropout.pause_begins()
        self._note_open()
        return True

    def announced_end(self) -> Mapping[str, Any]:
        """A framework ends a pause. Returns what was found in it, as fields of the event."""
        self.evaluating = False
        self._note_open()
        by_batch = self.dropout.take_by_batch()
        return {"dropping": self.dropout.pause_ends(), "by_batch": by_batch, "trained_share": self._take_share()}

    def pause(self) -> Callable[[], None]:
        """Guess nothing for a while; returns what ends that."""
        before = (self.announced, self.evaluating)
        self.announced = self.evaluating = True
        self._note_open()

        def resume() -> None:
            self.announced, self.evaluating = before
            self._note_open()

        return resume

    def draws_for_training(self, dataset: Any, *, gradients: bool) -> bool:
        """Whether a batch of ``dataset`` is to be trained on, as far as we can know."""
        if self.announced:
            if gradients and not self.evaluating:
                self._trains_on(dataset)
            return gradients and not self.evaluating
        if not gradients:
            return False
        known = self._training_data() if self._training_data is not None else None
        if self.evaluating:
            if dataset is not known or not all(root.training for root in self._view.roots()):
                return False
            self.end()
        elif known is not None and dataset is not known and self._evaluates():  # set to it by `train(False)`
            return False
        self._trains_on(dataset)
        return True

    def _trains_on(self, dataset: Any) -> None:
        with contextlib.suppress(TypeError):  # a list is a dataset, too
            self._training_data = weakref.ref(dataset)

    def begin(self) -> None:
        """Start a pause, unless there is one or training has not begun."""
        if not self.announced and not self.evaluating and self._started():
            self.evaluating = True
            self._note_open()
            self.dropout.pause_begins()
            self._emit(EventKind.EVAL_START)

    def _evaluates(self) -> bool:
        """Whether this is a pause. ``train(False)`` begins one as well, and is noticed here."""
        if self.announced or not self._started():
            return False
        if not self.evaluating and not all(root.training for root in self._view.roots()):
            self.begin()
        return self.evaluating

    def _is_trained(self, module: Any) -> bool:
        trained = {id(p) for root in self._view.roots() for p in root.parameters()}
        return any(id(p) in trained for p in module.parameters())

    def _in_train_mode(self) -> bool:
        roots = self._view.roots()
        return bool(roots) and all(root.training for root in roots)

    def batch(self, dataset: Any = None, batch: Any = None) -> None:
        """One batch of an evaluation was drawn, from this data set."""
        if self.evaluating or not self.announced:
            self._is_evaluated(dataset)
        if self.announced:
            return
        self.begin()
        if self.evaluating:
            with contextlib.suppress(TypeError):
                self.heldout.dataset = weakref.ref(dataset)
            self._emit(EventKind.EVAL_STEP, batch=batch)

    def _is_evaluated(self, dataset: Any) -> None:
        if len(self._evaluated) < SETS and not any(ref() is dataset for ref in self._evaluated):
            with contextlib.suppress(TypeError):
                self._evaluated.append(weakref.ref(dataset))

    def _take_share(self) -> float | None:
        """Which part of what was evaluated is trained on, of the set of which least is. Forgets the sets."""
        sets, self._evaluated = [dataset for ref in self._evaluated if (dataset := ref()) is not None], []
        trained = None if self._training_data is None else self._training_data()
        if trained is None or not sets or not self._session.board.reads(EventKind.EVAL_END, "trained_share"):
            return None
        return min(shared_rows(dataset, trained) for dataset in sets)

    def pass_begins(self) -> None:
        """A backward pass begins in a pause, and ends it."""
        drawn = None if self.heldout.dataset is None else self.heldout.dataset()
        known = None if self._training_data is None else self._training_data()
        if self.evaluating and drawn is not None and known is not None and drawn is not known:
            noted, step = self._session.facts.trained_on_evaluation, self._step()
            if not self._in_train_mode() and (not noted or noted[-1] != step):
                noted.append(step)
        self.end()

    def end(self) -> None:
        """Hand out what was collected. Called at the next backward pass and at the end."""
        if self.open:
            share = self._take_share()
            metrics, self._metrics = self._metrics, {}
            self.evaluating = self.open = False
            by_batch = self.dropout.take_by_batch()
            dropping = self.dropout.pause_ends()
            inferred, labels = self.heldout.take(), self.heldout.take_labels()
            if metrics or not inferred:
                self._emit(
                    EventKind.EVAL_END,
                    metrics=metrics or None,
                    label_counts=labels,
                    dropping=dropping,
                    by_batch=by_batch,
                    trained_share=share,
                )
                labels = dropping = by_batch = share = None
            if (
                "eval.loss" not in metrics and "eval.loss" not in self._session.logged
            ):  # what the script says of itself is better than what we make of it
                for dataset, loss, said in inferred:
                    facts: dict[str, Any] = {"dataset": dataset or "", "inferred": said, "label_counts": labels}
                    facts |= {"dropping": dropping, "by_batch": by_batch, "trained_share": share}
                    self._emit(EventKind.EVAL_END, {"loss": loss}, **facts)
                    labels = dropping = by_batch = share = None

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Metrics that the script gave to its own logger, under its own names."""
        session = self._session
        training: dict[str, Any] = {}
        for given, value in metrics.items():
            name = canonical_metric(given)
            if self.announced and (is_evaluation(name) or name.startswith("test.")):
                continue  # the framework has handed them out, under their data sets
            if is_evaluation(name):
                if name in self._metrics:  # a second round without a step between
                    self.end()
                self._metrics[name] = value
                self._note_open()
            elif name not in session.host.registry.metrics:  # we measure those ourselves, unfiltered
                training[name] = value
        if training:
            session.log(training)

    def _note_open(self) -> None:
        self.open = not self.announced and (self.evaluating or bool(self._metrics))

    def _emit(self, kind: EventKind, metrics: Mapping[str, Any] | None = None, **facts: Any) -> None:
        if self._session.wants(kind):
            event = Event(kind, self._step(), phase="eval", model=self._view, metrics=metrics, **facts)
            self._session.emit(event)
