"""From backward passes and optimizer steps to events: what counts as a step, and whose it is.

The script trainer and the loop trainer both feed this; it patches nothing itself.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any

from healthcheck.events import EventKind
from healthcheck.probes.gradients import HELD
from healthcheck.probes.innergrads import INNER, InnerGradients
from healthcheck.trainers.batches import batch_counts
from healthcheck.trainers.compiled import RegionNotes
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.gating import UpdateGate
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.lossmath import LossMath
from healthcheck.trainers.modelview import FoundModel, living_optimizers, parameters_of
from healthcheck.trainers.stepcount import StepCount, capturing
from healthcheck.trainers.unattempted import UnattemptedUpdates

if TYPE_CHECKING:
    from healthcheck.session import Session


class TrainingSteps(StepCount):
    """Counts attempted updates of one or several optimizers and emits the events of each.

    A step ends when the optimizers that stepped in the step before have all stepped again; the
    next begins with the next backward pass or attempt. The step number is that of the optimizer
    seen first: its n-th attempt is in step n.

    :param only: optimizers to look at; None for all.
    """

    def __init__(
        self, session: Session, view: FoundModel, controls: TorchControls, *, only: list[Any] | None = None
    ) -> None:
        super().__init__(session, view)
        self.controls = controls
        self.stop = controls.stop
        self.gate = controls.gate = UpdateGate(session)
        self.losses = LossMath()
        self.region = RegionNotes()
        self.unattempted = UnattemptedUpdates()
        self.backward_depth = 0
        """Above 0 inside a backward pass; passes nest under activation checkpointing."""
        self.only = None if only is None else weakref.WeakSet(only)
        self._index: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._attempted: set[int] = set()
        self._expected: set[int] | None = None
        self._living = 1
        self._inside_backward: weakref.ref[Any] | None = None
        self._inner = InnerGradients(session.probing.demand)
        self._batch: Any = None
        self.unmatched_loads: list[tuple[Any, str]] = []
        self._clear_update()

    def _clear_update(self) -> None:
        """Forget what belongs to one update of one optimizer."""
        self._grad_norm: Any = None
        self._max_norm: float | None = None
        self._clipped_scaled: bool | None = None
        self._backward_ended = False
        self._loss_scale: Any = None
        self._closure_ran = False
        self._dropped: list[tuple[Any, Any]] = []

    @property
    def held_back(self) -> bool:
        """Whether the optimizer that is stepping now finds no gradients, because we took them away."""
        return bool(self._dropped)

    def begin_anew(self) -> None:
        """Another training begins in this run: its optimizers have nothing to do with those before."""
        self._ended = True
        self._attempted, self._expected = set(), None
        self._index.clear()
        self.view.forget_optimizers()
        self._clear_update()
        self._look_around()
        self._announce()

    # -- data -------------------------------------------------------------------------

    def batch_drawn(self, batch: Any, waited: float, dataset: Any, *, gradients: bool) -> None:
        """A loader over ``dataset`` gave a batch after ``waited`` seconds.

        :param gradients: whether gradients are enabled where it was drawn.
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
            self._emit(EventKind.BATCH_READY, data_wait=waited, n_samples=samples, n_tokens=tokens, dataset_size=size)

    def batch_in_use(self, batch: Any) -> None:
        """What is trained on now, where a framework tells it: loaders draw ahead."""
        self._batch = batch

    # -- backward ---------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        """An outermost backward pass from ``tensors`` is about to run."""
        self.stop.check()
        if not self.started:
            self._start()
        self.phases.end()
        self.stop.check()
        self._catch_up()
        self._next_step_if_ended()
        self.unattempted.backward_begins()
        if self._closure_ran:  # LBFGS evaluates the loss many times a step; the first is the step's
            return
        loss = self.losses.of(tensors)
        if self.losses.scale is not None:
            self._loss_scale = self.losses.scale
        if self.session.wants(EventKind.LOSS):
            graph = getattr(tensors, "grad_fn", None)
            self._emit(EventKind.LOSS, loss=loss, loss_graph=graph, loss_weight=self.losses.weight(), batch=self._batch)

    def backward_done(self) -> None:
        """That pass is over; its gradients are there."""
        inside = self._inside_backward
        if inside is not None:
            self._inner_updates_done()
            self._end_step(inside(), 0, skipped=None)
            return
        self.unattempted.backward_done(self.view, self._living)
        if self.unattempted.counts_backwards and not self._ended:
            if self.session.unit != "backward":
                self.session.unit = "backward"
                self._begun = self._first_step + self.unattempted.backwards
            self.last_attempt = self._begun
            with _no_grad():
                self._emit(EventKind.BACKWARD_END)
            self._end_step(None, 0, skipped=None)

    def clipping(self, norm: Any, max_norm: float | None, scaled: bool = False) -> None:
        """Gradients are about to be clipped; ``norm`` is their L2 norm, None if it is not known.

        :param scaled: they still carry the loss scale.
        """
        if self._ended and not self._attempted:
            return  # nothing was differentiated yet
        self._next_step_if_ended()
        if norm is not None:
            self._grad_norm = norm.detach() if hasattr(norm, "detach") else norm
        self._max_norm, self._clipped_scaled = max_norm, scaled
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
        index = self._attempt(optimizer)
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
        if self.backward_depth or (self.only is not None and optimizer not in self.only):
            return
        index = self._index.get(optimizer, 0)
        self.gate.disarm(optimizer)
        for parameter, gradient in self._dropped:
            parameter.grad = gradient
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
        self.unattempted.attempted()
        if self._inside_backward is None:
            self._inside_backward = weakref.ref(optimizer)
            self.last_attempt = self._begun
            self.session.unit = "step"
            self.controls.updates_inside_backward()
            guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer, inside=True))
        with _no_grad():
            guarded(self.session, self._inner.take, optimizer, self._begun)

    def _inner_updates_done(self) -> None:
        self._inside_backward = None
        with _no_grad():
            found = guarded(self.session, self._inner.result, self.view.named_parameters())
        if found is not None:
            self.session.user_state[INNER] = (self._begun, *found)

    def _attempt(self, optimizer: Any) -> int:
        if not self.started:
            self._start()
        index = self._index.get(optimizer)
        if index is None:
            # Those that are gone have left theirs.
            index = next(i for i in itertools.count() if i not in self._index.values())
            self._index[optimizer] = index
            self.view.add_optimizer(optimizer)
            guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer))
        self.unattempted.attempted()
        self.session.unit = "step"
        if index in self._attempted and not self._ended:  # the others did not step this time
            self._ended = True
            self._emit(EventKind.STEP_END, optimizer=optimizer, optimizer_index=index)
            self._check_limits()
            self.stop.check()
        if index in self._attempted or self._begun == self._first_step:
            self._next_step_if_ended(attempt=True)
        self._attempted.add(index)
        self.last_attempt = self._begun
        return index

    def _before_update(self, optimizer: Any, index: int) -> None:
        """Gradients are final: show them, and stop or skip if somebody wants that."""
        unseen = self.region.clipped and not self._clipped_in_region()
        if unseen:
            self.controls.update_unseen("gradients are clipped inside a compiled graph")
        way = "none" if unseen or capturing() else self.gate.way(optimizer)
        session = self.session
        session.user_state[HELD] = []
        try:
            self._end_backward(index)
            self.controls.skipping = False
            self.controls.before_update = True
            session.prompt = way == "wait"
            if not unseen:
                with _no_grad():
                    self._emit_update(EventKind.BEFORE_UPDATE, optimizer, index)
        finally:
            self.controls.before_update = session.prompt = False
            session.user_state.pop(HELD, None)
        self.stop.check()
        if way == "device":
            guarded(self.session, self.gate.arm, optimizer, index)
        elif way != "none" and guarded(self.session, self.gate.breached, index):
            self.controls.skipping = True
        if self.controls.skipping or (self.stop.pending and self.stop.held):
            # Without gradients an optimizer leaves weights, moments and counters alone. They are put
            # back afterwards, for scripts that look at them.
            self._dropped = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
            for parameter, _ in self._dropped:
                parameter.grad = None

    def _end_backward(self, index: int = 0) -> None:
        if not self._backward_ended:
            self._backward_ended = True
            with _no_grad():
                self._emit_update(EventKind.BACKWARD_END, None, index)

    def _finish_attempt(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        expected = self._expected
        complete = len(self._attempted) >= self._living if expected is None else self._attempted >= expected
        if complete and not self._ended:
            self._end_step(optimizer, index, skipped=skipped)
        self._clear_update()
        self.stop.check()

    # -- steps ------------------------------------------------------------------------

    def _look_around(self) -> None:
        optimizers = living_optimizers() if self.only is None else list(self.only)
        self._living = len({id(parameters_of(o)[0]) for o in optimizers if parameters_of(o)})
        self.view.scan(optimizers)

    def _next_step_if_ended(self, *, attempt: bool = False) -> None:
        """Begin the next step, unless optimizers that have not stepped yet may still belong to this one."""
        others = bool(self._index) and len(self._attempted) < max(len(self._index), self._living)
        if self._ended and (attempt or not others):
            if self._attempted:
                self._expected = self._attempted
            self._attempted = set()
            self._begin_step()
            self.losses.step_begins()
            if self.session.wants(EventKind.STEP_START):
                self._emit(EventKind.STEP_START)

    def _end_step(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        self._ended = True
        loads, self.unmatched_loads = self.unmatched_loads, []
        self._emit_update(EventKind.STEP_END, optimizer, index, skipped=skipped, unmatched_loads=loads)
        self._batch = None
        self._clear_update()
        self._check_limits()
        self.stop.check()

    def _emit_update(self, kind: EventKind, optimizer: Any, index: int, **facts: Any) -> None:
        if not self.session.wants(kind, self._begun):
            return
        self._emit(
            kind,
            optimizer=optimizer,
            optimizer_index=index,
            grad_norm=self._grad_norm,
            max_norm=self._max_norm,
            clipped_scaled=self._clipped_scaled,
            loss_scale=self._loss_scale,
            batch=self._batch,
            max_steps=self.session.settings.get("max_steps") or self.max_steps,
            **facts,
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # a stream, or a length that the script's own class cannot tell
        return None


def _found_inf(optimizer: Any) -> bool:
    """Whether a ``GradScaler`` drives a fused step that will not be applied; only told on the host."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and getattr(getattr(found, "device", None), "type", "") == "cpu" and bool(found)


class _no_grad:
    """``torch.no_grad()`` at a fraction of its cost: it is entered twice in every step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        import torch

        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        import torch

        torch._C._set_grad_enabled(self._before)
