"""From backward passes and optimizer steps to events.

The script trainer and the loop trainer both feed this; it patches nothing itself.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from healthcheck.events import EventKind
from healthcheck.probes.gradients.statistics import HeldGradients
from healthcheck.probes.nograd import no_grad
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.gating import UpdateGate
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.steps.batches import batch_counts
from healthcheck.trainers.steps.compiled import RegionNotes
from healthcheck.trainers.steps.count import capturing
from healthcheck.trainers.steps.inner import InnerUpdates
from healthcheck.trainers.steps.lossmath import LossMath
from healthcheck.trainers.steps.unattempted import UnattemptedUpdates
from healthcheck.trainers.steps.updates import UpdateSteps
from healthcheck.trainers.steps.withheld import WithheldGradients

if TYPE_CHECKING:
    from healthcheck.session import Session


class TrainingSteps(UpdateSteps):
    """Takes what torch does, call by call, and emits the events of each step.

    :param only: optimizers to look at; None for all.
    """

    def __init__(
        self, session: Session, view: FoundModel, controls: TorchControls, *, only: list[Any] | None = None
    ) -> None:
        super().__init__(session, view, controls, only=only)
        self.gate = controls.gate = UpdateGate(session)
        self.losses = LossMath()
        self.region = RegionNotes()
        self.unattempted: UnattemptedUpdates | None = UnattemptedUpdates()
        """Until an optimizer has stepped."""
        self.backward_depth = 0
        """Above 0 inside a backward pass; passes nest under activation checkpointing."""
        self._held: HeldGradients | None = None
        """The gradients of the update at hand, for its optimizer."""
        self._stepping: dict[int, int] = {}
        """Optimizers inside their step, by id, with their index."""
        self._inner = InnerUpdates(session)

    @property
    def held_back(self) -> bool:
        """Whether the optimizer that is stepping now finds no gradients, because we took them away."""
        return self._withheld is not None

    def _begin_step(self) -> None:
        super()._begin_step()
        self.losses.step_begins()

    def _met(self, optimizer: Any) -> None:
        self.unattempted = None
        guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer))

    # -- data -------------------------------------------------------------------------

    def batch_drawn(self, batch: Any, waited: float, dataset: Any, *, gradients: bool, **facts: Any) -> None:
        """A loader over ``dataset`` gave a batch after ``waited`` seconds.

        :param gradients: whether gradients are enabled where it was drawn.
        :param facts: what else its loader knows of it, by their names in an event.
        """
        self._catch_up()
        if not self.phases.draws_for_training(dataset, gradients=gradients):
            self.phases.batch()
            return
        self._batch = batch
        if self.session.wants(EventKind.BATCH_READY):
            self._next_step_if_ended()
            samples, tokens = batch_counts(batch)
            size = _length(dataset)
            counts: dict[str, Any] = {"n_samples": samples, "n_tokens": tokens, "dataset_size": size}
            self._emit(EventKind.BATCH_READY, data_wait=waited, **counts, **facts)

    def batch_in_use(self, batch: Any) -> None:
        """What is trained on now, where a framework tells it: loaders draw ahead."""
        self._batch = batch

    # -- backward ---------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        """An outermost backward pass from ``tensors`` is about to run."""
        if not self.started:
            self._start()
        self.phases.end()
        self.stop.check()
        self._catch_up()
        self._next_step_if_ended()
        if self.unattempted is not None:
            self.unattempted.backward_begins()
        if self._closure_ran:  # LBFGS evaluates the loss many times a step; the first is the step's
            return
        self._differentiated = True
        if self._clipped_idly:
            self._clipped_idly, self._clipped = False, []
        loss = self.losses.of(tensors)
        if self.losses.scale is not None:
            self._loss_scale = self.losses.scale
        if EventKind.LOSS in self.session.wanted:
            graph = getattr(tensors, "grad_fn", None)
            self._emit(EventKind.LOSS, loss=loss, loss_graph=graph, loss_weight=self.losses.weight(), batch=self._batch)

    def backward_done(self) -> None:
        """That pass is over; its gradients are there."""
        if self._inner.first is not None:
            optimizer, self._inner_gradients = self._inner.end(self.view, self._begun)
            self._end_step(optimizer, 0, skipped=None)
            return
        unattempted = self.unattempted
        if unattempted is None:
            return
        unattempted.backward_done(self.view, self._living)
        if unattempted.counts_backwards and not self._ended:
            if self.session.unit != "backward":
                self.session.unit = "backward"
                self._begun = self._first_step + unattempted.backwards
            self.last_attempt = self._begun
            with no_grad():
                self._emit(EventKind.BACKWARD_END)
            self._end_step(None, 0, skipped=None)

    def clipping(
        self, norm: Any, max_norm: float | None, scaled: bool = False, parameters: list[Any] | None = None
    ) -> None:
        """Gradients are about to be clipped; ``norm`` is their L2 norm, None if it is not known.

        :param scaled: they still carry the loss scale.
        :param parameters: whose gradients they are; None if nothing can come of it.
        """
        if self._differentiated is False and len(self._index) == 1:
            self._clipped_idly = self._clipped_idly or parameters is not None
            return
        if self._ended and not self._attempted:
            return  # nothing was differentiated yet
        self._next_step_if_ended()
        if norm is not None:
            self._grad_norm = norm.detach() if hasattr(norm, "detach") else norm
        self._max_norm, self._clipped_scaled = max_norm, scaled
        if parameters is not None:
            self._clipped = [*(self._clipped or ()), *parameters]
        with no_grad():
            self._end_backward()

    # -- update -----------------------------------------------------------------------

    def update_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer's step begins. Returns new ``(args, kwargs)`` where a closure must be watched."""
        if self.only is not None and optimizer not in self.only:
            return None
        self.stop.check()
        self._catch_up()
        if self.backward_depth:
            self._step_inside_backward(optimizer)
            return None
        index = self._stepping[id(optimizer)] = self._attempt(optimizer)
        if _found_inf(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._before_update(optimizer, index)
            return None

        def watched_closure(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            if not self._closure_ran:
                self._closure_ran = True
                guarded(self.session, self._before_update, optimizer, index)
            return result

        if len(args) > 1:
            return (args[0], watched_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched_closure}

    def update_done(self, optimizer: Any) -> None:
        """An optimizer's step is over."""
        index = self._stepping.pop(id(optimizer), None)
        if index is None:
            return
        self._held = None
        self.gate.disarm(optimizer)
        if self._withheld is not None:
            self._withheld.give_back()
        skipped = _found_inf(optimizer)
        if not skipped:
            self._emit_update(EventKind.AFTER_UPDATE, optimizer, index)
        scaled = self._loss_scale is not None
        self._finish_attempt(optimizer, index, skipped=skipped if scaled else None)

    def scaler_steps(self, scale: Any) -> None:
        """A ``GradScaler`` with this scale is about to step, or to skip."""
        self._loss_scale = scale

    def update_skipped(self, optimizer: Any, scale: Any) -> None:
        """A ``GradScaler`` found non-finite gradients and did not step."""
        if self.only is not None and optimizer not in self.only:
            return
        self.stop.check()
        index = self._attempt(optimizer)
        self._loss_scale = scale
        self._finish_attempt(optimizer, index, skipped=True)

    def finish(self) -> None:
        with contextlib.suppress(BaseException):
            self._catch_up()
        super().finish()

    def _catch_up(self) -> None:
        """Count an update that a compiled region made, step and all; nobody saw its gradients as they were used."""
        region = self.region
        optimizer, region.stepped = region.stepped, None
        if optimizer is None or (self.only is not None and optimizer not in self.only):
            return
        index = self._attempt(optimizer)
        if region.clipped:
            self._clipped_in_region()
        self.controls.update_unseen(f"the step of {type(optimizer).__name__} is compiled into a larger graph")
        self._finish_attempt(optimizer, index, skipped=None)

    def _clipped_in_region(self) -> bool:
        """Take over what a compiled region told of its clipping. False if it hides what the gradients were."""
        region = self.region
        norm, limit, known = region.total_norm, region.max_norm, region.by_l2 and region.total_norm is not None
        region.forget()
        self._backward_ended = True
        if known:
            self._grad_norm = norm.detach()
            self._max_norm = None if hasattr(limit, "detach") else limit
        return known

    def _step_inside_backward(self, optimizer: Any) -> None:
        """One optimizer per parameter, stepping while gradients are still being made: one pass is one step."""
        if self._inner.first is None:
            self.unattempted = None
            self.last_attempt = self._begun
            self.session.unit = "step"
            self.controls.updates_inside_backward()
            guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer, inside=True))
        self._inner.made(optimizer, self._begun)

    def _before_update(self, optimizer: Any, index: int) -> None:
        """Gradients are final: show them, and stop or skip if somebody wants that."""
        unseen = self.region.clipped and not self._clipped_in_region()
        if unseen:
            self.controls.update_unseen("gradients are clipped inside a compiled graph")
        way = "none" if unseen or capturing() else self.gate.way(optimizer)
        session, controls = self.session, self.controls
        kept = self._kept_gradients = HeldGradients()
        controls.skipping, controls.before_update = False, True
        self.gate.waits = way == "wait"
        try:
            if not unseen:
                with no_grad():
                    self._show_update(optimizer, index)
        finally:
            controls.before_update = self.gate.waits = False
            self._kept_gradients = None
        self._held = kept if kept.small else None
        self.stop.check()
        if way == "device":
            guarded(session, self.gate.arm, optimizer, index)
        elif way != "none" and guarded(session, self.gate.breached, index):
            controls.skipping = True
        if controls.skipping or (self.stop.pending and self.stop.state.by_framework):
            self._withheld = WithheldGradients.of(optimizer)

    def _show_update(self, optimizer: Any, index: int) -> None:
        """Tell all that is to be known of an update while it can still be held back."""
        self._end_backward(index)
        self._emit_update(EventKind.BEFORE_UPDATE, optimizer, index)

    def _end_backward(self, index: int = 0) -> None:
        if not self._backward_ended:
            self._backward_ended = True
            self._emit_update(EventKind.BACKWARD_END, None, index)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a stream, or a length that the script's own class cannot tell
        return None


def _found_inf(optimizer: Any) -> bool:
    """Whether a ``GradScaler`` drives a fused step that will not be applied; only told on the host."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and getattr(getattr(found, "device", None), "type", "") == "cpu" and bool(found)
