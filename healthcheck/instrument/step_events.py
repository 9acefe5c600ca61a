"""A step as it is shown: where a training is, the events of a step, and its update while it can still be held back."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.rows import Update
from healthcheck.instrument.data import batch_counts, length_of
from healthcheck.instrument.gate import has_state
from healthcheck.instrument.guarding import contain, guarded
from healthcheck.instrument.modelview import FoundModel, parameters_of
from healthcheck.instrument.step_rows import StepNotes, UpdateFacts
from healthcheck.instrument.updates import UpdatePlan
from healthcheck.probes.gradient_statistics import HeldGradients

if TYPE_CHECKING:
    from healthcheck.instrument.controls import TorchControls
    from healthcheck.run.session import Session


class Stage(enum.Enum):
    """Where a training is.

    ::

        IDLE -> FORWARD -> BACKWARD -> FORWARD -> UPDATING -> ENDED -> FORWARD -> ...

    Passes and updates may lie inside each other: a closure differentiates inside of an update. An optimizer that steps
    less often than others may make its pass and its update after the step has ended: BACKWARD and UPDATING lead back to
    where they came from.
    """

    IDLE = "idle"
    """No step has begun."""
    FORWARD = "forward"
    """A step is under way, and neither a backward pass nor an update is running."""
    BACKWARD = "backward"
    """Inside a backward pass."""
    UPDATING = "updating"
    """Inside an optimizer's step."""
    ENDED = "ended"
    """The last step is over, the next has not begun."""


class EndedBy(enum.Enum):
    """Who says when a step is over."""

    UPDATES = "updates"
    """Nobody: it is over when its optimizers have stepped."""
    LOOP = "loop"
    """A loop says so, and we count."""
    FRAMEWORK = "framework"
    """A framework says so, and counts."""


class StepEvents:
    """Builds the events of steps and hands them to the session."""

    def __init__(self, session: Session, view: FoundModel, notes: StepNotes) -> None:
        self._session = session
        self._notes = notes
        self.view = view
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
                    row=self._notes.row if self._notes.noting else None,
                    model=self.view,
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
        session.emit(
            Event(
                kind,
                step,
                epoch=self.epoch,
                row=self._notes.row if self._notes.noting else None,
                model=self.view,
                **facts,
            )
        )

    def train_start(self, step: int) -> None:
        """A training begins; a process may make several."""
        if self._session.wants(EventKind.TRAIN_START):
            event = Event(EventKind.TRAIN_START, step, epoch=self.epoch, model=self.view, max_steps=self.planned)
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
        self._session.emit(Event(EventKind.CHECKPOINT_SAVED, step, model=self.view, path=path))


# --------------------------------------------------------------------------------------------------
# An update as it is shown: while it can still be held back.


_FINAL = (EventKind.BEFORE_UPDATE,)
_COMPLETE_AND_FINAL = (EventKind.BACKWARD_END, EventKind.BEFORE_UPDATE)
"""Gradients are final once they have been clipped; where nobody clips, they are so when they are complete."""


@dataclass(slots=True)
class Running:
    """An optimizer that is inside its step."""

    index: int
    announced: bool = False
    """Whether a framework has said so itself: the hooks of torch then say it a second time."""
    skip: bool = False
    """Set by whoever wants this update kept from happening, while that can still be done."""
    armed: bool = False
    """Whether the device decides if the update is applied."""
    withheld: WithheldGradients | None = None
    gradients: Any = None
    """The gradients, kept so that the optimizer finds the Python objects that we have made of them."""


class WithheldGradients:
    """The gradients of an optimizer, taken away from it until its step is over."""

    __slots__ = ("_taken",)

    def __init__(self, taken: list[tuple[Any, Any]]) -> None:
        self._taken = taken

    @classmethod
    def of(cls, optimizer: Any) -> WithheldGradients | None:
        """Take them away: without any, an optimizer leaves weights, moments and counters alone. None if it has none."""
        taken = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return cls(taken) if taken else None

    def give_back(self) -> None:
        """Put them back after the step, for scripts that look at them."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient


class UpdateHold:
    """Shows an update while it can still be held back, and holds it back where somebody wants that.

    In one of two ways: the device decides (``found_inf``, see :class:`~healthcheck.instrument.gate.UpdateGate`), or the
    optimizer finds no gradients.
    """

    def __init__(self, session: Session, controls: TorchControls, events: StepEvents, notes: StepNotes) -> None:
        self._notes = notes
        self._session = session
        self._controls = controls
        self._events = events
        self._gate = controls.gate
        self._stop = controls.stop
        self.on_final_gradients: Callable[[int], None] | None = None
        """Called with an optimizer's index when its gradients are final, before they are shown."""

    def before(
        self, optimizer: Any, plan: UpdatePlan, running: Running, facts: UpdateFacts, step: int, *, seen: bool = True
    ) -> None:
        """Gradients are final: show them, and stop or skip if somebody wants that.

        :param seen: False where they cannot be looked at, so that nobody may judge them.
        """
        import torch

        session, controls, gate, stop, notes = self._session, self._controls, self._gate, self._stop, self._notes
        capturing, way = self._events.capturing, plan.way
        if not seen or (capturing is not None and capturing()):
            seen, way = False, "none"
        elif way != "none" and session.info.world_size > 1 and gate.alone(step):
            way = "none"
        elif way == "device" and not has_state(optimizer):
            way = "wait"  # a fused SGD skipped at its first step keeps a momentum buffer that nobody has initialised
        # Whoever looks at gradients first keeps their Python objects for the others, and for the optimizer.
        gradients = facts.kept_gradients = HeldGradients()
        controls.update, gate.waits = running, way == "wait"
        gate.now, gate.kept, gate.idle, gate.breach = [], False, way == "none", None
        grad_enabled = torch.is_grad_enabled()  # as `no_grad` does, at two calls less in every step
        torch._C._set_grad_enabled(False)
        try:
            if seen:
                if self.on_final_gradients is not None:
                    guarded(session, self.on_final_gradients, plan.index)
                kinds = _FINAL if facts.backward_ended else _COMPLETE_AND_FINAL
                facts.backward_ended = True
                if not notes.noting:
                    self._events.show(kinds, step, facts, optimizer, plan.index)
                else:
                    plan.update.limits = gate.device_limits(plan.index, step) if way == "device" else None
                    row = notes.final(step, optimizer, plan.update, facts)
                    if row.alarming or (way != "none" and not gate.keeps(row, way)):
                        session.judge.alarmed = True
                        session.board.look_closely()
                    if not session.wanted.isdisjoint(kinds):
                        self._events.show(kinds, step, facts, optimizer, plan.index)
        finally:
            torch._C._set_grad_enabled(grad_enabled)
            controls.update, gate.waits, session.judge.alarmed, facts.kept_gradients = None, False, False, None
        if gradients.small:
            running.gradients = gradients
        if stop.state.request is not None:
            stop.check()
        if way == "device":
            running.armed = True
            guarded(session, gate.arm, optimizer, plan.index)
        elif way != "none" and not gate.kept:
            try:
                running.skip = gate.breached(plan.index) or running.skip
            except Exception as error:  # as `guarded` does, at one call less in every step
                contain(session, error, "breached")
        if running.skip or (stop.state.request is not None and stop.deferred):
            running.withheld = WithheldGradients.of(optimizer)

    def gradients_complete(self, facts: UpdateFacts, step: int) -> None:
        """The loop is about to clip gradients that are complete: show them to those who look at every update."""
        import torch

        session, notes, capturing = self._session, self._notes, self._events.capturing
        if capturing is None or not capturing():
            limits = self._gate.device_limits(0, step)  # whoever will use them: nearly always the first optimizer
            update = Update(self._events.view, session.demand, final=False, limits=limits)
            grad_enabled = torch.is_grad_enabled()  # as in `before`
            torch._C._set_grad_enabled(False)
            try:
                notes.look(notes.complete(step, facts), update)
            finally:
                torch._C._set_grad_enabled(grad_enabled)

    def after(self, optimizer: Any, running: Running) -> None:
        """Its step is over: leave the optimizer and its gradients as they were found."""
        if running.armed:
            self._gate.disarm(optimizer)
        if running.withheld is not None:
            running.withheld.give_back()
