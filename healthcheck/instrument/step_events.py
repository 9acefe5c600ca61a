"""What is known and shown of a run: the events of its steps, and the pauses in which it is evaluated."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.names import canonical_metric, is_evaluation
from healthcheck.instrument.data import batch_counts, length_of
from healthcheck.instrument.modelview import FoundModel

if TYPE_CHECKING:
    from healthcheck.run.session import Session


@dataclass(slots=True)
class UpdateFacts:
    """What is known of the update at hand. A new one takes its place when the update is over."""

    grad_norm: Any = None
    """L2 norm of the gradients before clipping, where the loop has worked it out; a number or a 0-dim tensor."""
    max_norm: float | None = None
    clipped_scaled: bool | None = None
    """Whether gradients still carried the loss scale when they were clipped; None without clipping."""
    clipped: list[Any] | None = None
    """Parameters whose gradients were clipped; None where no clipping was seen."""
    loss_scale: Any = None
    backward_ended: bool = False
    """Whether ``backward_end`` was shown: gradients are complete."""
    closure_ran: bool = False
    """LBFGS evaluates its loss many times an update; the first evaluation is the update's."""

    kept_gradients: Any = None
    """While an update is shown: gradients that whoever looked first keeps for the others, and for the optimizer."""
    inner_gradients: Any = None
    """What was measured of gradients that optimizers used inside the backward pass."""

    optimizer: Any = None
    """The first optimizer that stepped, where a loop or a framework says later that its step is over."""
    index: int = 0
    skipped: bool | None = None

    def made(self, optimizer: Any, index: int, skipped: bool | None) -> None:
        """An optimizer has stepped. What a loop says of its step belongs to the first of several optimizers."""
        if self.optimizer is None:
            self.optimizer, self.index, self.skipped = optimizer, index, skipped


class StepEvents:
    """Builds the events of steps and hands them to the session."""

    def __init__(self, session: Session, view: FoundModel) -> None:
        self._session = session
        self._view = view
        self.epoch: float | None = None
        """Epoch, where a framework announces it."""
        self.planned: int | None = None
        """Length of the run in steps, where a framework announces it."""
        self.batch: Any = None
        """The batch that is trained on."""
        self.saves_announced = False
        """True while a framework announces its checkpoints itself."""
        self._saved: tuple[int, str] | None = None
        self.capturing: Callable[[], bool] | None = None
        """Whether a CUDA graph is being captured; None until it is known how to ask. Nothing is shown meanwhile: what we
        launch would become a part of the script's graph, and be replayed with it.
        """

    def learn_to_ask(self) -> None:
        """Find out how to ask whether a graph is captured. While CUDA is not in use it cannot be asked."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if not torch.version.cuda and not torch.version.hip:
            self.capturing = bool  # nothing to ask: no
        elif torch.cuda.is_initialized():
            self.capturing = torch._C._cuda_isCurrentStreamCapturing

    def show(
        self, kinds: Iterable[EventKind], step: int, facts: UpdateFacts, optimizer: Any, index: int, **more: Any
    ) -> None:
        """Those of these events that are wanted in this step, with all that is known of the update of an optimizer.

        :param more: further facts by their names in an event.
        """
        if self.capturing is not None and self.capturing():
            return
        session = self._session
        for kind in kinds:
            if kind not in session.wanted:
                continue
            session.emit(
                Event(
                    kind,
                    step,
                    epoch=self.epoch,
                    model=self._view,
                    # Gradients are complete before it is known who will use them.
                    optimizer=None if kind is EventKind.BACKWARD_END else optimizer,
                    optimizer_index=index,
                    grad_norm=facts.grad_norm,
                    max_norm=facts.max_norm,
                    clipped_scaled=facts.clipped_scaled,
                    clipped=facts.clipped,
                    loss_scale=facts.loss_scale,
                    kept_gradients=facts.kept_gradients,
                    batch=self.batch,
                    max_steps=session.stop.most_steps or self.planned,
                    **more,
                )
            )

    def emit(self, kind: EventKind, step: int, **facts: Any) -> None:
        """One event that says nothing of an update."""
        if self.capturing is not None and self.capturing():
            return
        session = self._session
        session.emit(Event(kind, step, epoch=self.epoch, model=self._view, **facts))

    def train_start(self, step: int) -> None:
        """A training begins; a process may make several."""
        if self._session.wants(EventKind.TRAIN_START):
            event = Event(EventKind.TRAIN_START, step, epoch=self.epoch, model=self._view, max_steps=self.planned)
            self._session.emit(event)

    def batch_ready(self, step: int, batch: Any, dataset: Any, **more: Any) -> None:
        """A loader over ``dataset`` gave a batch. ``more``: as for :meth:`show`."""
        samples, tokens = batch_counts(batch)
        counts = {"n_samples": samples, "n_tokens": tokens, "dataset_size": length_of(dataset)}
        self.emit(EventKind.BATCH_READY, step, **counts, **more)

    def checkpoint_saved(self, step: int, path: str) -> None:
        """A file was written. The files of one step in one folder are one checkpoint."""
        place = (step, os.path.dirname(os.path.abspath(path)))
        if self.saves_announced or place == self._saved or not self._session.wants(EventKind.CHECKPOINT_SAVED):
            return
        self._saved = place
        self._session.emit(Event(EventKind.CHECKPOINT_SAVED, step, model=self._view, path=path))


class Evaluations:
    """Pauses of training in which a script evaluates its model, and the metrics that it logs itself.

    Where nobody announces them, a pause begins when the trained model is set to evaluation mode, or when batches are
    drawn without gradients; it ends with the next backward pass, or with the run. Evaluation results that the script
    logs are collected and handed out at that end.

    :param started: whether training has begun.
    :param step: the step that a pause belongs to.
    """

    def __init__(
        self, session: Session, view: FoundModel, *, started: Callable[[], bool], step: Callable[[], int]
    ) -> None:
        self._session = session
        self._view = view
        self._started = started
        self._step = step
        self._metrics: dict[str, Any] = {}
        self._training_data: weakref.ref[Any] | None = None
        self.evaluating = False
        self.announced = False
        """True while a framework announces its evaluations itself: then nothing is guessed here."""
        self.open = False
        """Whether :meth:`end` has something to do."""

    def announce(self, announced: bool) -> None:
        """From now on a framework says when it evaluates, or does so no longer."""
        self.announced = announced
        self._note_open()

    def announced_begin(self) -> bool:
        """A framework begins a pause. False if one has begun already."""
        if self.evaluating:
            return False
        self.evaluating = True
        self._note_open()
        return True

    def announced_end(self) -> None:
        self.evaluating = False
        self._note_open()

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
            return gradients and not self.evaluating
        if not gradients:
            return False
        if self.evaluating:
            known = self._training_data() if self._training_data is not None else None
            if dataset is not known or not all(root.training for root in self._view.roots()):
                return False
            self.end()
        with contextlib.suppress(TypeError):  # a list is a dataset, too
            self._training_data = weakref.ref(dataset)
        return True

    def begin(self) -> None:
        """Start a pause, unless there is one or training has not begun."""
        if not self.announced and not self.evaluating and self._started():
            self.evaluating = True
            self._note_open()
            self._emit(EventKind.EVAL_START)

    def batch(self) -> None:
        """One batch of an evaluation was drawn."""
        if self.announced:
            return
        self.begin()
        if self.evaluating:
            self._emit(EventKind.EVAL_STEP)

    def end(self) -> None:
        """Hand out what was collected. Called at the next backward pass and at the end."""
        if self.open:
            metrics, self._metrics = self._metrics, {}
            self.evaluating = self.open = False
            self._emit(EventKind.EVAL_END, metrics=metrics or None)

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

    def _emit(self, kind: EventKind, metrics: Mapping[str, Any] | None = None) -> None:
        if self._session.wants(kind):
            self._session.emit(Event(kind, self._step(), phase="eval", model=self._view, metrics=metrics))
