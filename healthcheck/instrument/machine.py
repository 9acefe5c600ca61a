"""The step machine: from what is seen of a training, call by call, to the events of each step.

It patches nothing and asks nobody. *Sources* feed it through one small interface, in the order in which things happen:

- a backward pass: ``pass_begins`` and ``pass_ends``, or ``pass_fails``;
- an optimizer's step: ``update_begins`` and ``update_ends``, or :func:`~healthcheck.instrument.unseen.update_skipped`;
- a batch, a clipping, a loss scale: ``batch_drawn``, ``clipped``, ``scaled_by``;
- where somebody says so: ``step_begins`` and ``step_ends``.

The sources are the hooks in torch (:mod:`healthcheck.instrument.hooks`), a loop under ``watch()`` and a framework
that announces its steps (:mod:`healthcheck.instrument.sources`). Nothing else counts steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import EventKind
from healthcheck.core.runinfo import StateLoads
from healthcheck.device.tensors import no_grad
from healthcheck.instrument import unseen
from healthcheck.instrument.agreement import agreement_of
from healthcheck.instrument.compiled import RegionNotes
from healthcheck.instrument.controls import AskedEnd, TorchControls
from healthcheck.instrument.evaluations import Evaluations
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_events import EndedBy, Running, Stage, StepEvents, UpdateHold
from healthcheck.instrument.step_rows import LISTENED, LoggedSteps, LossMath, StepNotes, UpdateFacts, detached
from healthcheck.instrument.unseen import InnerUpdates, UnattemptedUpdates
from healthcheck.instrument.unwatched import UnwatchedSteps
from healthcheck.instrument.updates import PARAMS, Optimizers, UpdatePlan, found_inf_on_host, with_closure

if TYPE_CHECKING:
    from healthcheck.run.session import Session


class StepMachine:
    """Numbers the steps of one run, from its first event to its last, and shows what happens in them.

    A step is one attempted update. Where nobody says when it is over, it is over when the optimizers that stepped in the
    step before have all stepped again, and the next begins with the next backward pass or attempt; its number is that of
    the optimizer seen first, whose n-th attempt is in step n. Optimizers left behind by an earlier run count from here.

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
        self.announced = ended_by is not EndedBy.UPDATES  # somebody says when a step is over
        self.optimizers = Optimizers(view, only, session, met=self._met, way=controls.gate.way)
        self.losses = LossMath()
        self.region = RegionNotes()
        self.notes = StepNotes(session)
        self.events = StepEvents(session, view, self.notes)

        # Where we are. A pass and an update are laid over the place where the step stands.
        self._standing = Stage.IDLE
        """IDLE, FORWARD or ENDED."""
        self.in_pass = False
        self.running: dict[int, Running] = {}
        """Optimizers inside their step, by id."""
        self.started: bool = False
        """Whether training has begun. The data of its first step may come before that."""
        self.number: int = session.step
        """Number of the step that is under way or has just ended."""
        self.last_attempt: int = session.step
        """Step of the last attempted update: where evaluations and checkpoints belong."""
        self.began_after = session.step
        """The step after which this run began."""
        step, batch = (lambda: max(1, self.last_attempt)), (lambda: self.events.batch)
        self.evaluations = Evaluations(session, view, started=lambda: self.started, step=step, batch=batch)

        # The update at hand.
        self.facts = UpdateFacts()
        self.updates = 0
        """Updates made or skipped so far, by any optimizer."""
        self._hold = UpdateHold(session, controls, self.events, self.notes)
        self.inner = InnerUpdates(session)
        self.unattempted = None if self.announced else UnattemptedUpdates()
        """Until an optimizer has stepped."""
        self.fresh: bool | None = None
        """Whether a backward pass was made since the last update; None before the first pass."""
        self._clipped_idly = False
        """Whether gradients were clipped after the last update, and before there were new ones."""
        self._loss_shown_in = -1
        """Step in which a loss was shown last."""
        self.paused = False
        """While True, the hooks in torch show us nothing of passes and updates."""
        self.before_first: Callable[[], None] | None = None
        """Called once, before anything of the first step is shown."""
        self.unwatched = UnwatchedSteps(self)
        self._asked_end = AskedEnd(session)
        self.logged = LoggedSteps(self, numbered=ended_by is EndedBy.FRAMEWORK)

    @property
    def stage(self) -> Stage:
        """Where the training is now; of what lies inside each other, the innermost."""
        return Stage.BACKWARD if self.in_pass else Stage.UPDATING if self.running else self._standing

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
        return any(running.withheld is not None for running in self.running.values())

    # -- begin and end of a run -------------------------------------------------------

    def start_at(self, step: int) -> None:
        """The run goes on after ``step`` updates that were made before (a resume). Before the first event."""
        self.began_after = self.number = self.last_attempt = step

    def start(self) -> None:
        """Training begins, unless it has begun: a framework knows before the first backward pass."""
        if self.started:
            return
        self._prepare()
        self.started = True
        self._asked_end.training_begins()
        self.optimizers.look_around()
        agreement = guarded(self.session, agreement_of, self.session)
        if agreement is not None:
            self.session.agree_through(agreement)
        self.events.train_start(self.number if self.under_way else self.number + 1)

    def begin_anew(self) -> None:
        """Another training begins in this run (a fold, a trial); its optimizers have nothing to do with those before."""
        self.unwatched.watch_again()
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
        self.unwatched.watch_again()
        with contextlib.suppress(BaseException):
            unseen.catch_up(self)
        self.optimizers.retire()
        session = self.session
        judged = session.engine.step
        with contextlib.suppress(BaseException):
            self.evaluations.end()
        # Batches and results of an evaluation are shown in step 1, also where nothing was trained.
        session.step = max(self.last_attempt, self.began_after) if self.started else min(session.step, judged)

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
        session = self.session
        began, own = perf_counter_ns(), session.own_ns
        try:
            unseen.catch_up(self)
            if not self.evaluations.draws_for_training(dataset, gradients=gradients):
                self.evaluations.batch(dataset, batch)
                return
            if getattr(batch, "shape", None) != (0,):  # a pass that gave nothing
                self.events.batch = batch
            if session.wants(EventKind.BATCH_READY) or session.wants(EventKind.STEP_START):
                if self._standing is not Stage.FORWARD:
                    self.begin_step(wait=True, late=False)
                if self.notes.noting:
                    self.notes.batch(batch, waited, dataset, begins_pass=more.get("begins_pass", False))
                if EventKind.BATCH_READY in session.wanted or more.get("worker_draws"):
                    self.events.batch_ready(self.number, batch, dataset, data_wait=waited, **more)
        finally:
            session.own_ns = own + perf_counter_ns() - began

    def checkpoint_saved(self, path: str) -> None:
        """A file was written, in the step that has ended last."""
        if self.started:
            self.events.checkpoint_saved(max(self.last_attempt, self.began_after), path)

    # -- backward ---------------------------------------------------------------------

    def pass_enters(self) -> None:
        """A backward pass begins, of which nothing else is to be noted: -> BACKWARD."""
        self.in_pass = True
        unseen.catch_up(self)

    def pass_begins(self, tensors: Any) -> None:
        """An outermost backward pass from ``tensors`` is about to run: -> BACKWARD, also where we fail."""
        session = self.session
        began, own = perf_counter_ns(), session.own_ns
        try:
            if not self.started:
                self.start()
            if self.evaluations.open:
                self.evaluations.pass_begins()
            if self.evaluations.heldout.learning:
                self.evaluations.heldout.pass_begins(tensors)
            if self.stop.state.request is not None:
                self.stop.check()
            if self.region.stepped is not None:
                unseen.catch_up(self)
            if self._standing is not Stage.FORWARD:
                self.begin_step(wait=True)
            if self.unattempted is not None:
                self.unattempted.pass_begins()
            if self.facts.closure_ran:  # LBFGS evaluates the loss many times a step; the first is the step's
                return
            self.fresh = True
            if self._clipped_idly:
                self._clipped_idly, self.facts.clipped = False, []
            losses = self.losses
            loss = losses.of(tensors, self.number)
            if losses.scale is not None:
                self.facts.take(loss_scale=losses.scale)
            notes, capturing, wanted = self.notes, self.events.capturing, session.wanted
            if loss is not None and (notes.noting or EventKind.LOSS in wanted):
                self._loss_shown_in = self.number
            noted = (notes.noting or notes.on) and not (capturing is not None and capturing())
            if noted and not notes.loss(self.number, loss, losses.weight):
                session.board.look_for_fault(self.number)  # its graph is there now, and never again
            if notes.noting and noted and self.events.batch is not None:
                notes.batch_used(self.events.batch)
            if EventKind.LOSS in wanted:
                graph = getattr(tensors, "grad_fn", None)
                facts = {"loss": loss, "loss_graph": graph, "loss_weight": losses.weight, "batch": self.events.batch}
                self.events.emit(EventKind.LOSS, self.number, **facts)
        finally:
            self.in_pass = True
            session.own_ns = own + perf_counter_ns() - began  # with all that events have counted meanwhile

    def pass_fails(self) -> None:
        """The pass was left by an exception, or never run."""
        self.in_pass = False

    def pass_ends(self) -> None:
        """That pass is over; its gradients are there."""
        self.in_pass = False
        if self.inner.first is not None or self.unattempted is not None:
            unseen.pass_ends(self)

    # -- clipping, scaling ------------------------------------------------------------

    def clipped(
        self, norm: Any, max_norm: float | None, scaled: bool = False, parameters: list[Any] | None = None
    ) -> None:
        """Gradients are about to be clipped; ``norm`` is their L2 norm, None if it is not known.

        :param scaled: they still carry the loss scale.
        :param parameters: whose gradients they are; None if nothing can come of it.
        """
        began, own = perf_counter_ns(), self.session.own_ns
        try:
            if self.announced:  # passes may not be seen, so that this is the first sign of a step
                self.start()
                if self._standing is not Stage.FORWARD:
                    self.begin_step()
            # A framework may say that it begins an update before it clips for it.
            if self.fresh is False and len(self.optimizers) == 1 and not self.running:
                self._clipped_idly = self._clipped_idly or parameters is not None
                return
            if self._standing is not Stage.FORWARD:
                if not self.optimizers.stepped:
                    return  # nothing was differentiated yet
                self.begin_step(wait=True)
            facts = self.facts
            known = facts.grad_norm if norm is None else detached(norm)
            facts.take(grad_norm=known, max_norm=max_norm, clipped_scaled=scaled)
            if parameters is not None:
                facts.clipped = [*(facts.clipped or ()), *parameters]
            if not facts.backward_ended:
                facts.backward_ended = True
                if self.notes.noting:
                    self._hold.gradients_complete(facts, self.number)
                if EventKind.BACKWARD_END in self.session.wanted:
                    with no_grad():
                        self.events.show((EventKind.BACKWARD_END,), self.number, facts, None, 0)
        finally:
            self.session.own_ns = own + perf_counter_ns() - began

    def scaled_by(self, scale: Any) -> None:
        """A ``GradScaler`` with this scale is about to step."""
        self.facts.take(loss_scale=scale)

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
        known = self.running.get(id(optimizer))
        if known is not None and known.announced and not announced:
            return None
        session = self.session
        began, own = perf_counter_ns(), session.own_ns
        try:
            if self.stop.state.request is not None:
                self.stop.check()
            if self.region.stepped is not None:
                unseen.catch_up(self)
            if self.in_pass:
                unseen.update_inside_pass(self, optimizer)
                return None
            plan = self.attempt(optimizer)
            running = self.running[id(optimizer)] = Running(plan.index, announced)
            if getattr(optimizer, "found_inf", None) is not None and found_inf_on_host(optimizer):
                return None
            closure = args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None
            if closure is None or not callable(closure):
                if self.region.clipped:
                    self._before_update(optimizer, plan, running)
                else:
                    self._hold.before(optimizer, plan, running, self.facts, self.number)
                return None
        finally:
            session.own_ns = own + perf_counter_ns() - began

        def evaluated() -> None:
            if not self.facts.closure_ran:  # gradients are final after the first evaluation
                self.facts.closure_ran = True
                guarded(self.session, self._before_update, optimizer, plan, running)

        return with_closure(closure, evaluated, args, kwargs or {})

    def update_ends(self, optimizer: Any, index: int = -1, *, skipped: bool | None = None) -> None:
        """An optimizer's step is over. So is the whole step, unless others are waited for, or somebody says when it is.

        :param index: of the optimizer, where only the attempt was seen; ``skipped``: whether such an update was left out.
        """
        session, facts = self.session, self.facts
        began, own = perf_counter_ns(), session.own_ns
        try:
            if index < 0:
                running = self.running.pop(id(optimizer), None)
                if running is None:
                    return
                index = running.index
                if running.armed or running.withheld is not None:
                    self._hold.after(optimizer, running)
                not_made = getattr(optimizer, "found_inf", None) is not None and found_inf_on_host(optimizer)
                if EventKind.AFTER_UPDATE in session.wanted and not not_made:
                    self.events.show((EventKind.AFTER_UPDATE,), self.number, facts, optimizer, index)
                skipped = None if facts.loss_scale is None else not_made
            self.updates += 1
            notes, optimizers = self.notes, self.optimizers
            if not notes.noting or skipped or notes.row is None or not notes.row.attempted:
                notes.attempted(self.number, optimizer, index, bool(skipped))
            if self.announced:
                facts.made(optimizer, index, skipped)
            elif self._standing is Stage.FORWARD and (
                len(optimizers.stepped) >= optimizers.living
                if optimizers.expected is None
                else optimizers.stepped >= optimizers.expected
            ):
                self.end_step(optimizer, index, skipped=skipped)
            else:
                if notes.row is not None:
                    notes.close(self.number, index)
                self.facts = UpdateFacts()
                if self.stop.state.request is not None:
                    self.stop.check()
        finally:
            session.own_ns = own + perf_counter_ns() - began

    def update_fails(self, optimizer: Any) -> None:
        """An announced update was left by an exception, or never made."""
        self.running.pop(id(optimizer), None)

    def attempt(self, optimizer: Any) -> UpdatePlan:
        """An optimizer is about to step, or to be skipped. Returns what is to be done about it."""
        if not self.started:
            self.start()
        optimizers = self.optimizers
        plan = optimizers.plans.get(id(optimizer))
        # As `sizes_of` does, at one call less in every step.
        sizes = tuple(map(len, map(PARAMS, optimizer.param_groups)))
        if plan is None or plan.sizes != sizes or plan.optimizer() is not optimizer:
            plan = optimizers.plan(optimizer)
        index, stepped = plan.index, optimizers.stepped
        self.session.unit = "step"
        repeated = index in stepped
        if repeated and self._standing is Stage.FORWARD and self.ended_by is not EndedBy.FRAMEWORK:
            # The others did not step this time, or a loop has not said that its step was over. What is known of this
            # attempt belongs to the next step.
            coming = self.facts, self.events.batch, self.notes.put_aside(self.number, index)
            self.facts = UpdateFacts()
            self.end_step(optimizer, index)
            self.facts, self.events.batch, self.notes.row = coming
        # Else an update after the step's end belongs to it: that of an optimizer which steps less often than others.
        if self._standing is not Stage.FORWARD and (repeated or not stepped or self.announced):
            self.begin_step()
        optimizers.stepped.add(index)
        self.fresh = None if self.fresh is None else False
        self.last_attempt = self.number
        if self.logged.heard or self.number <= LISTENED:
            self.logged.step_over(self.number)
        else:  # as that does, at a call less in most steps
            self.logged.step, self.logged.place = self.number, []
        return plan

    def _met(self, optimizer: Any) -> None:
        """An optimizer steps for the first time."""
        self.unattempted = None
        guarded(self.session, self.controls.cannot_gate, self.gate.cannot(optimizer))
        # A rule that is to be judged before each update needs the samples of each.
        self.notes.on = self.notes.allowed and not self.session.judge.acts_before_updates

    def _before_update(self, optimizer: Any, plan: UpdatePlan, running: Running) -> None:
        """Gradients are final."""
        seen = not self.region.clipped or self.region.take_clipping(self.facts)
        if not seen:
            self.controls.update_unseen("gradients are clipped inside a compiled graph")
        self._hold.before(optimizer, plan, running, self.facts, self.number, seen=seen)

    def when_gradients_are_final(self, function: Callable[[int], None]) -> None:
        """Have ``function`` called with an optimizer's index before its gradients are shown for an update."""
        self._hold.on_final_gradients = function

    # -- steps ------------------------------------------------------------------------

    def step_begins(self, number: int, *, late: bool = False) -> None:
        """A framework begins step ``number`` (from 1), unless it has begun with its data already; ``late`` as in an event."""
        self.start()
        if self._standing is not Stage.FORWARD:
            self.number = number - 1
            self.begin_step(late=late)
        elif number != self.number:
            self.number = number
            self.session.begin_step(number, self.notes.noting)
            if self.notes.row is not None:
                self.notes.row.step = number

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
        unseen.catch_up(self)
        if number is not None:
            self.step_begins(number, late=True)
        elif self._standing is not Stage.FORWARD:  # a replayed graph steps without an attempt that we see
            self.begin_step()
        self.last_attempt = self.number
        self.logged.step_over(self.number)
        loss, facts = detached(loss), self.facts
        reported = loss is not None and self._loss_shown_in != self.number
        if reported and self.notes.noting and not self.notes.reported(self.number, facts.index, loss, loss_weight):
            self.session.board.look_closely()
        if reported and EventKind.LOSS in self.session.wanted:
            self.events.emit(EventKind.LOSS, self.number, loss=loss, losses=losses, loss_weight=loss_weight)
        if facts.grad_norm is None and grad_norm is not None:
            facts.take(grad_norm=detached(grad_norm))
        if facts.max_norm is None and max_norm is not None:
            facts.take(max_norm=max_norm)
        skipped = facts.skipped if skipped is None else skipped
        self.end_step(facts.optimizer, facts.index, skipped=skipped, loss=loss, losses=losses, **more)

    def begin_step(self, *, wait: bool = False, late: bool = True) -> None:
        """-> FORWARD; with ``wait`` not while optimizers that have not stepped yet may belong to the step that has ended."""
        optimizers = self.optimizers
        stepped, known = optimizers.stepped, len(optimizers.plans)
        if wait and known and not self.announced and len(stepped) < max(known, optimizers.living):
            return
        if stepped:
            optimizers.expected, optimizers.stepped = stepped, set()
        if self.before_first is not None:
            self._prepare()
        self._standing = Stage.FORWARD
        self.number += 1
        if self.events.capturing is None:
            self.events.learn_to_ask()
        session, board = self.session, self.session.board
        noting = self.notes.noting = self.notes.on
        if not noting or self.number >= board.busy_at or self.number <= board.quiet_from:
            session.begin_step(self.number, noting)
        if noting:
            session.step = self.number
        if EventKind.STEP_START in self.session.wanted:
            self.events.emit(EventKind.STEP_START, self.number, late=late)

    def end_step(self, optimizer: Any, index: int, **more: Any) -> None:
        """-> ENDED. ``more``: what else is known of the step, by the names in an event."""
        self._standing = Stage.ENDED
        facts_of_run = self.session.facts
        loads: StateLoads | None = None
        found = facts_of_run.loads
        if found.unmatched or found.own or found.copies:
            loads, facts_of_run.loads = found, StateLoads()  # said once, whether or not anybody listens
        elif self.number == self.began_after + 1:
            loads = StateLoads()
        flags = self.gate.flags
        held_back = flags[1] if flags[0] == self.number else None
        notes, session, capturing = self.notes, self.session, self.events.capturing
        wanted = EventKind.STEP_END in session.wanted or loads is not None or more.get("metrics") is not None
        try:
            if notes.noting and not (capturing is not None and capturing()):
                most = session.stop.most_steps or self.events.planned
                notes.close(self.number, index, self.facts, held_back, most, more)
                if self.events.epoch is not None:
                    session.epoch = self.events.epoch
                judge = session.judge
                due = self.number >= judge.due_step or session.board.noted_until >= judge.due_time
                if (due or session.holds) and not wanted:
                    session.step_noted(self.number)
            if wanted or not notes.noting:
                inner = self.facts.inner_gradients
                more |= {"loads": loads, "inner_gradients": inner, "held_back": held_back}
                heard = session.wanted.copy()
                session.wanted.update((EventKind.STEP_END,) if wanted else ())  # also for facts that come seldom
                self.events.show((EventKind.STEP_END,), self.number, self.facts, optimizer, index, **more)
                session.wanted &= heard
        finally:
            self.events.batch = None
            self.facts = UpdateFacts()
        stop = self.stop.state
        if stop.most_steps is not None or stop.most_seconds is not None or stop.request is not None:
            self.check_end()
        if self.session.own_ns >= self.session.budget.binds_at:
            self.unwatched.due = True

    def check_end(self) -> None:
        """Between two steps: the end that the user asked for, and a stop."""
        self._asked_end.check(self.number, made=self.number - self.began_after)
        self.stop.step_over(self.number)
