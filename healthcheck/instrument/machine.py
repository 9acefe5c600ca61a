"""The step machine: from what is seen of a training, call by call, to the events of each step.

It patches nothing and asks nobody. *Sources* feed it through one small interface, in the order in which things happen:

- a backward pass: ``pass_begins`` and ``pass_ends``, or ``pass_fails``;
- an optimizer's step: ``update_begins`` and ``update_ends``, or ``update_skipped``;
- a batch, a clipping, a loss scale: ``batch_drawn``, ``clipped``, ``scaled_by``;
- where somebody says so: ``step_begins`` and ``step_ends``.

The sources are the hooks in torch (:mod:`healthcheck.instrument.hooks`), a loop under ``watch()`` and a framework
that announces its steps (:mod:`healthcheck.instrument.sources`). Nothing else counts steps.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import EventKind
from healthcheck.core.runinfo import StateLoads
from healthcheck.device.tensors import no_grad
from healthcheck.instrument.agreement import agreement_of
from healthcheck.instrument.compiled import RegionNotes
from healthcheck.instrument.controls import AskedEnd, TorchControls
from healthcheck.instrument.evaluations import Evaluations
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_events import LossMath, Stage, StepEvents, UpdateFacts
from healthcheck.instrument.updates import (
    InnerUpdates,
    Optimizers,
    Running,
    UnattemptedUpdates,
    UpdateHold,
    UpdatePlan,
    found_inf_on_host,
    with_closure,
)

if TYPE_CHECKING:
    from healthcheck.run.session import Session


class EndedBy(enum.Enum):
    """Who says when a step is over."""

    UPDATES = "updates"
    """Nobody: it is over when its optimizers have stepped."""
    LOOP = "loop"
    """A loop says so, and we count."""
    FRAMEWORK = "framework"
    """A framework says so, and counts."""


class StepMachine:
    """Numbers the steps of one run, from its first event to its last, and shows what happens in them.

    A step is one attempted update. Where nobody says when it is over, it is over when the optimizers that stepped in the
    step before have all stepped again, and the next begins with the next backward pass or attempt; its number is that of
    the optimizer seen first, whose n-th attempt is in step n. Optimizers that an earlier run in this process left behind
    count from their first step in this one.

    :param only: optimizers to look at; None for all.
    """

    def __init__(
        self,
        session: Session,
        view: FoundModel,
        controls: TorchControls,
        *,
        only: Iterable[Any] | None = None,
        ended_by: EndedBy = EndedBy.UPDATES,
    ) -> None:
        self.session = session
        self.view = view
        self.controls = controls
        self.stop = controls.stop
        self.gate = controls.gate
        self.ended_by = ended_by
        self._announced = ended_by is not EndedBy.UPDATES
        self.optimizers = Optimizers(view, only, met=self._met, gated=lambda: controls.gate.rules is not None)
        self.losses = LossMath()
        self.region = RegionNotes()
        self.events = StepEvents(session, view)
        self.evaluations = Evaluations(
            session,
            view,
            started=lambda: self.started,
            step=lambda: max(1, self.last_attempt),
            batch=lambda: self.events.batch,
        )

        # Where we are. A pass and an update are laid over the place where the step stands.
        self._standing = Stage.IDLE
        """IDLE, FORWARD or ENDED."""
        self.in_pass = False
        self._running: dict[int, Running] = {}
        """Optimizers inside their step, by id."""
        self.started = False
        """Whether training has begun. The data of its first step may come before that."""
        self.number = session.step
        """Number of the step that is under way or has just ended."""
        self.last_attempt = session.step
        """Step of the last attempted update: where evaluations and checkpoints belong."""
        self._first = session.step
        """The step after which this run began."""

        # The update at hand.
        self.facts = UpdateFacts()
        self.updates = 0
        """Updates made or skipped so far, by any optimizer."""
        self._hold = UpdateHold(session, controls, self.events)
        self._inner = InnerUpdates(session)
        self._unattempted = None if self._announced else UnattemptedUpdates()
        """Until an optimizer has stepped."""
        self._fresh: bool | None = None
        """Whether a backward pass was made since the last update; None before the first pass."""
        self._clipped_idly = False
        """Whether gradients were clipped after the last update, and before there were new ones."""
        self._loss_shown_in = -1
        """Step in which a loss was shown last."""

        # The run.
        self.paused = False
        """While True, the hooks in torch show us nothing of passes and updates."""
        self.before_first: Callable[[], None] | None = None
        """Called once, before anything of the first step is shown."""
        self._asked_end = AskedEnd(session)

    @property
    def stage(self) -> Stage:
        """Where the training is now; of what lies inside each other, the innermost."""
        if self.in_pass:
            return Stage.BACKWARD
        return Stage.UPDATING if self._running else self._standing

    @property
    def under_way(self) -> bool:
        """True between the beginning of a step and its end."""
        return self._standing is Stage.FORWARD

    @property
    def step(self) -> int:
        """The step that is under way, or the last one between two steps; 1 before the first."""
        return max(self.number, 1)

    @property
    def updates_withheld(self) -> bool:
        """Whether an optimizer that is stepping now finds no gradients, because we took them away."""
        return any(running.withheld is not None for running in self._running.values())

    # -- begin and end of a run -------------------------------------------------------

    def start_at(self, step: int) -> None:
        """The run goes on after ``step`` updates that were made before (a resume). Before the first event."""
        self._first = self.number = self.last_attempt = step

    def start(self) -> None:
        """Training begins, unless it has begun: a framework knows before the first backward pass."""
        if self.started:
            return
        self._prepare()
        self.started = True
        self.optimizers.look_around()
        agreement = guarded(self.session, agreement_of, self.session)
        if agreement is not None:
            self.session.agree_through(agreement)
        self.events.train_start(self.number if self.under_way else self.number + 1)

    def begin_anew(self) -> None:
        """Another training begins in this run (a fold, a trial); its optimizers have nothing to do with those before."""
        self._standing = Stage.ENDED
        self.optimizers.forget()
        self.facts = UpdateFacts()
        self.optimizers.look_around()
        self.events.train_start(self.number + 1)

    def pause(self) -> Callable[[], None]:
        """Somebody else sees this process's training for a while; returns what ends the pause."""
        before = (self.paused, self.events.saves_announced, self.optimizers.watch_only(()))
        resume_evaluations = self.evaluations.pause()
        self.paused = self.events.saves_announced = True

        def resume() -> None:
            self.paused, self.events.saves_announced, only = before
            self.optimizers.watch_only(only)
            resume_evaluations()

        return resume

    def finish(self) -> None:
        """The run is over: hand out what still waits. Never raises a stop."""
        with contextlib.suppress(BaseException):
            self._catch_up()
        self.optimizers.retire()
        session = self.session
        judged = session.engine.step
        with contextlib.suppress(BaseException):
            self.evaluations.end()
        # Batches and results of an evaluation are shown in step 1, also where nothing was trained.
        session.step = max(self.last_attempt, self._first) if self.started else min(session.step, judged)

    def _prepare(self) -> None:
        prepare, self.before_first = self.before_first, None
        if prepare is not None:
            guarded(self.session, prepare)

    # -- data, checkpoints ------------------------------------------------------------

    def batch_drawn(self, batch: Any, waited: float, dataset: Any, *, gradients: bool, **more: Any) -> None:
        """A loader over ``dataset`` gave a batch after ``waited`` seconds.

        :param gradients: whether gradients are enabled where it was drawn.
        :param more: what else its loader knows of it, by the names in an event.
        """
        self._catch_up()
        if not self.evaluations.draws_for_training(dataset, gradients=gradients):
            self.evaluations.batch(dataset)
            return
        self.events.batch = batch
        if self.session.wants(EventKind.BATCH_READY):
            if self._standing is not Stage.FORWARD:
                self._begin_step(wait=True)
            self.events.batch_ready(self.number, batch, dataset, data_wait=waited, **more)

    def load_unmatched(self, module: weakref.ref[Any], words: str) -> None:
        """A state dict was loaded of which not one name fitted."""
        self.session.facts.loads.unmatched.append((module, words))

    def checkpoint_saved(self, path: str) -> None:
        """A file was written, in the step that has ended last."""
        if self.started:
            self.events.checkpoint_saved(max(self.last_attempt, self._first), path)

    # -- backward ---------------------------------------------------------------------

    def pass_enters(self) -> None:
        """A backward pass begins, of which nothing else is to be noted: -> BACKWARD."""
        self.in_pass = True
        self._catch_up()

    def pass_begins(self, tensors: Any) -> None:
        """An outermost backward pass from ``tensors`` is about to run: -> BACKWARD, also where we fail."""
        try:
            if not self.started:
                self.start()
            if self.evaluations.open:
                self.evaluations.end()
            if self.evaluations.heldout.learning:
                self.evaluations.heldout.pass_begins(tensors)
            if self.stop.state.request is not None:
                self.stop.check()
            if self.region.stepped is not None:
                self._catch_up()
            if self._standing is not Stage.FORWARD:
                self._begin_step(wait=True)
            if self._unattempted is not None:
                self._unattempted.pass_begins()
            if self.facts.closure_ran:  # LBFGS evaluates the loss many times a step; the first is the step's
                return
            self._fresh = True
            if self._clipped_idly:
                self._clipped_idly, self.facts.clipped = False, []
            losses = self.losses
            loss = losses.of(tensors, self.number)
            if losses.scale is not None:
                self.facts.loss_scale = losses.scale
            if EventKind.LOSS in self.session.wanted:
                if loss is not None:
                    self._loss_shown_in = self.number
                graph = getattr(tensors, "grad_fn", None)
                facts = {"loss": loss, "loss_graph": graph, "loss_weight": losses.weight, "batch": self.events.batch}
                self.events.emit(EventKind.LOSS, self.number, **facts)
        finally:
            self.in_pass = True

    def pass_fails(self) -> None:
        """The pass was left by an exception, or never run."""
        self.in_pass = False

    def pass_ends(self) -> None:
        """That pass is over; its gradients are there."""
        self.in_pass = False
        if self._inner.first is not None:  # optimizers have stepped inside of it: it was the step
            optimizer, self.facts.inner_gradients = self._inner.end(self.view, self.number)
            self.updates += 1
            self.facts.made(optimizer, 0, None) if self._announced else self._end_step(optimizer, 0)
        elif self._unattempted is not None:
            self._end_pass_without_updates(self._unattempted)

    def _end_pass_without_updates(self, unattempted: UnattemptedUpdates) -> None:
        """No optimizer has ever stepped: if none is going to, a pass has to serve as a step."""
        unattempted.pass_ends(self.view, self.optimizers.living)
        if not unattempted.counts_passes or self._standing is not Stage.FORWARD:
            return
        if self.session.unit != "backward":
            self.session.unit = "backward"
            self.number = max(self.number, self._first + unattempted.passes)
            self.session.begin_step(self.number)
        self.last_attempt = self.number
        with no_grad():
            self.events.emit(EventKind.BACKWARD_END, self.number)
        self._end_step(None, 0)

    # -- clipping, scaling ------------------------------------------------------------

    def clipped(
        self, norm: Any, max_norm: float | None, scaled: bool = False, parameters: list[Any] | None = None
    ) -> None:
        """Gradients are about to be clipped; ``norm`` is their L2 norm, None if it is not known.

        :param scaled: they still carry the loss scale.
        :param parameters: whose gradients they are; None if nothing can come of it.
        """
        if self._announced:  # passes may not be seen, so that this is the first sign of a step
            self.start()
            if self._standing is not Stage.FORWARD:
                self._begin_step()
        if self._fresh is False and len(self.optimizers) == 1:
            self._clipped_idly = self._clipped_idly or parameters is not None
            return
        if self._standing is not Stage.FORWARD:
            if not self.optimizers.stepped:
                return  # nothing was differentiated yet
            self._begin_step(wait=True)
        facts = self.facts
        if norm is not None:
            facts.grad_norm = _detached(norm)
        facts.max_norm, facts.clipped_scaled = max_norm, scaled
        if parameters is not None:
            facts.clipped = [*(facts.clipped or ()), *parameters]
        if not facts.backward_ended:
            facts.backward_ended = True
            with no_grad():
                self.events.show((EventKind.BACKWARD_END,), self.number, facts, None, 0)

    def scaled_by(self, scale: Any) -> None:
        """A ``GradScaler`` with this scale is about to step, or to skip."""
        self.facts.loss_scale = scale

    # -- updates ----------------------------------------------------------------------

    def update_begins(
        self,
        optimizer: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        announced: bool = False,
    ) -> Any:
        """An optimizer's step begins: -> UPDATING. Returns new ``(args, kwargs)`` where a closure must be watched.

        :param args: of its ``step``, itself first.
        :param announced: a framework says so outside of the step; what the hooks in torch say of it is left alone then.
        """
        only = self.optimizers.only
        if only is not None and optimizer not in only:
            return None
        known = self._running.get(id(optimizer))
        if known is not None and known.announced and not announced:
            return None
        if self.stop.state.request is not None:
            self.stop.check()
        if self.region.stepped is not None:
            self._catch_up()
        if self.in_pass:
            self._update_inside_pass(optimizer)
            return None
        plan = self._attempt(optimizer)
        running = self._running[id(optimizer)] = Running(plan.index, announced)
        if getattr(optimizer, "found_inf", None) is not None and found_inf_on_host(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None
        if closure is None or not callable(closure):
            self._before_update(optimizer, plan, running)
            return None

        def evaluated() -> None:
            if not self.facts.closure_ran:  # gradients are final after the first evaluation
                self.facts.closure_ran = True
                guarded(self.session, self._before_update, optimizer, plan, running)

        return with_closure(closure, evaluated, args, kwargs or {})

    def update_ends(self, optimizer: Any) -> None:
        """An optimizer's step is over."""
        running = self._running.pop(id(optimizer), None)
        if running is None:
            return
        if running.armed or running.withheld is not None:
            self._hold.after(optimizer, running)
        skipped = getattr(optimizer, "found_inf", None) is not None and found_inf_on_host(optimizer)
        facts = self.facts
        if EventKind.AFTER_UPDATE in self.session.wanted and not skipped:
            self.events.show((EventKind.AFTER_UPDATE,), self.number, facts, optimizer, running.index)
        self._update_over(optimizer, running.index, None if facts.loss_scale is None else skipped)

    def update_fails(self, optimizer: Any) -> None:
        """An announced update was left by an exception, or never made."""
        self._running.pop(id(optimizer), None)

    def update_skipped(self, optimizer: Any, scale: Any) -> None:
        """A ``GradScaler`` found non-finite gradients and did not step."""
        only = self.optimizers.only
        if only is not None and optimizer not in only:
            return
        if self.stop.state.request is not None:
            self.stop.check()
        plan = self._attempt(optimizer)
        self.facts.loss_scale = scale
        self._update_over(optimizer, plan.index, True)

    def _attempt(self, optimizer: Any) -> UpdatePlan:
        """An optimizer is about to step, or to be skipped. Returns what is to be done about it."""
        if not self.started:
            self.start()
        plan = self.optimizers.plan(optimizer)
        index, stepped = plan.index, self.optimizers.stepped
        self.session.unit = "step"
        repeated = index in stepped
        if repeated and self._standing is Stage.FORWARD and self.ended_by is not EndedBy.FRAMEWORK:
            # The others did not step this time, or a loop has not said that its step was over.
            self._standing = Stage.ENDED
            held_back = self.gate.held_back(self.number)
            self.events.emit(
                EventKind.STEP_END, self.number, optimizer=optimizer, optimizer_index=index, held_back=held_back
            )
            self._check_end()
        # Else an update after the step's end belongs to it: that of an optimizer which steps less often than others.
        if self._standing is not Stage.FORWARD and (repeated or not stepped or self._announced):
            self._begin_step()
        self.optimizers.stepped.add(index)
        if self._fresh:
            self._fresh = False
        self.last_attempt = self.number
        return plan

    def _met(self, optimizer: Any) -> None:
        """An optimizer steps for the first time."""
        self._unattempted = None
        guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer))

    def _before_update(self, optimizer: Any, plan: UpdatePlan, running: Running) -> None:
        """Gradients are final."""
        seen = not self.region.clipped or self.region.take_clipping(self.facts)
        if not seen:
            self.controls.update_unseen("gradients are clipped inside a compiled graph")
        self._hold.before(optimizer, plan, running, self.facts, self.number, seen=seen)

    def when_gradients_are_final(self, function: Callable[[int], None]) -> None:
        """Have ``function`` called with an optimizer's index before its gradients are shown for an update."""
        self._hold.on_final_gradients = function

    def _update_over(self, optimizer: Any, index: int, skipped: bool | None) -> None:
        """An attempt was made. The step is over, unless other optimizers are waited for, or somebody says when it is."""
        self.updates += 1
        if self._announced:
            self.facts.made(optimizer, index, skipped)
        elif self._standing is Stage.FORWARD and self.optimizers.all_stepped:
            self._end_step(optimizer, index, skipped=skipped)
        else:
            self.facts = UpdateFacts()
            if self.stop.state.request is not None:
                self.stop.check()

    # -- updates that nobody sees as they are made ------------------------------------

    def _update_inside_pass(self, optimizer: Any) -> None:
        """One optimizer per parameter, stepping while gradients are still being made: one pass is one step."""
        if self._inner.first is None:
            self.start()
            if self._standing is not Stage.FORWARD:
                self._begin_step()
            self._unattempted = None
            self.last_attempt = self.number
            self.session.unit = "step"
            self.controls.updates_inside_backward()
            guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer, inside=True))
        self._running.pop(id(optimizer), None)  # of a step that raised
        self._inner.made(optimizer, self.number)

    def _catch_up(self) -> None:
        """Count an update that a compiled region made, step and all; nobody saw its gradients as they were used."""
        region, only = self.region, self.optimizers.only
        optimizer, region.stepped = region.stepped, None
        if optimizer is None or (only is not None and optimizer not in only):
            return
        plan = self._attempt(optimizer)
        region.take_clipping(self.facts)
        self.controls.update_unseen(f"the step of {type(optimizer).__name__} is compiled into a larger graph")
        self._update_over(optimizer, plan.index, None)

    # -- steps ------------------------------------------------------------------------

    def step_begins(self, number: int) -> None:
        """A framework begins step ``number`` (from 1), unless it has begun with its data already."""
        self.start()
        if self._standing is not Stage.FORWARD:
            self.number = number - 1
            self._begin_step()
        elif number != self.number:
            self.number = number
            self.session.begin_step(number)

    def step_ends(
        self,
        *,
        number: int | None = None,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        loss_weight: float | None = None,
        grad_norm: Any = None,
        max_norm: float | None = None,
        skipped: bool | None = None,
        **more: Any,
    ) -> None:
        """A loop or a framework says that its step is over; what was seen of it goes before what it says.

        :param number: of the step, where the framework counts; None: the one under way.
        :param loss: of the whole step; a number or a scalar tensor, which is not read here.
        :param loss_weight: as in :class:`~healthcheck.core.events.Event`.
        :param grad_norm: L2 norm before clipping.
        :param skipped: True if the update was not applied.
        :param more: further facts, by the names in an event.
        """
        self.start()
        self.evaluations.end()
        self._catch_up()
        if number is not None:
            self.step_begins(number)
        elif self._standing is not Stage.FORWARD:  # a replayed graph steps without an attempt that we see
            self._begin_step()
        self.last_attempt = self.number
        loss, facts = _detached(loss), self.facts
        if loss is not None and self._loss_shown_in != self.number and EventKind.LOSS in self.session.wanted:
            self.events.emit(EventKind.LOSS, self.number, loss=loss, losses=losses, loss_weight=loss_weight)
        if facts.grad_norm is None:
            facts.grad_norm = _detached(grad_norm)
        if facts.max_norm is None:
            facts.max_norm = max_norm
        skipped = facts.skipped if skipped is None else skipped
        self._end_step(facts.optimizer, facts.index, skipped=skipped, loss=loss, losses=losses, **more)

    def _begin_step(self, *, wait: bool = False) -> None:
        """-> FORWARD; with ``wait`` not while optimizers that have not stepped yet may belong to the step that has ended."""
        if not self.optimizers.next_step(wait=wait and not self._announced):
            return
        if self.before_first is not None:
            self._prepare()
        self._standing = Stage.FORWARD
        self.number += 1
        if self.events.capturing is None:
            self.events.learn_to_ask()
        self.session.begin_step(self.number)
        if EventKind.STEP_START in self.session.wanted:
            self.events.emit(EventKind.STEP_START, self.number)

    def _end_step(self, optimizer: Any, index: int, **more: Any) -> None:
        """-> ENDED. ``more``: what else is known of the step, by the names in an event."""
        self._standing = Stage.ENDED
        facts_of_run = self.session.facts
        loads: StateLoads | None = None
        if facts_of_run.loads.unmatched or facts_of_run.loads.own:
            loads, facts_of_run.loads = facts_of_run.loads, StateLoads()  # said once, whether or not anybody listens
        elif self.number == self._first + 1:
            loads = StateLoads()
        more |= {
            "loads": loads,
            "inner_gradients": self.facts.inner_gradients,
            "held_back": self.gate.held_back(self.number),
        }
        try:
            self.events.show((EventKind.STEP_END,), self.number, self.facts, optimizer, index, **more)
        finally:
            self.events.batch = None
            self.facts = UpdateFacts()
        stop = self.stop.state
        if stop.most_steps is not None or stop.most_seconds is not None or stop.request is not None:
            self._check_end()

    def _check_end(self) -> None:
        """Between two steps: the end that the user asked for, and a stop."""
        self._asked_end.check(self.number, made=self.number - self._first)
        if self.stop.state.request is not None:
            self.stop.check()


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value
