"""Steps that nobody watches: what the hooks do while the budget leaves steps out.

They count. A step that is left out has its number like any other, and costs a few comparisons: no event is built, no probe
asked. What stays is the look at a loss on the CPU, where a rule would stop for one that is not finite: such a step is
watched after all, from its backward pass on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.rows import Update
from healthcheck.core.runinfo import weak
from healthcheck.probes.memory_readings import waited_for_cpu

if TYPE_CHECKING:
    from healthcheck.instrument.compiled import RegionNotes
    from healthcheck.instrument.controls import StopSwitch
    from healthcheck.instrument.evaluations import Evaluations
    from healthcheck.instrument.modelview import FoundModel
    from healthcheck.instrument.step_events import StepEvents
    from healthcheck.instrument.step_rows import LoggedSteps, LossMath
    from healthcheck.instrument.updates import Optimizers
    from healthcheck.run.session import Session

HOOKS_NS = 8000
"""Nanoseconds that our hooks take in a step that is left out: too short to be timed one by one.
``benchmarks/cpu_time.py`` shows the whole."""


MOST_WAITED = 0.9
"""Part of the time that a thread can have waited for a processor: more would be another thread's."""


class Counted(Protocol):
    """The step machine, as far as it is needed here."""

    session: Session
    view: FoundModel
    stop: StopSwitch
    events: StepEvents
    evaluations: Evaluations
    optimizers: Optimizers
    announced: bool
    number: int
    last_attempt: int
    updates: int
    losses: LossMath
    logged: LoggedSteps
    region: RegionNotes
    paused: bool

    @property
    def under_way(self) -> bool: ...
    def step_begins(self, number: int) -> None: ...
    def check_end(self) -> None: ...


class UnwatchedSteps:
    """Counts the steps of one :class:`~healthcheck.instrument.machine.StepMachine` while they are left out, in its place.

    Steps are counted by what ended the last watched one: the updates of the optimizers that stepped in it, its backward
    pass (where no optimizer steps outside of one), or somebody who says so.
    """

    def __init__(self, machine: Counted) -> None:
        self.left = 0
        """Steps that are still to be left out. Hooks look here before anything else."""
        self.due = False
        """Whether a watched step is over, so that :meth:`decide` is to be called: as soon as our own time in it is counted."""
        self.by_pass = False
        """Whether a backward pass is a step."""
        self.single = False
        """Whether each update of an optimizer is a step."""
        self.alone = 0
        """Id of the only optimizer, while nothing need be done before its updates."""
        self._life: weakref.ref[Any] | None = None
        self._machine = machine
        self._waited = waited_for_cpu()
        machine.session.budget.asked = True
        self._turns: dict[int, int] = {}
        """Ids of the optimizers whose updates make a step, with their indices; empty: updates do not count."""
        self._known: dict[int, Callable[[], Any]] = {}
        """The same optimizers by weak references: an id may be given again."""
        self._stepped: set[int] = set()
        """Those that have stepped in the step at hand, where there are several."""
        self._done = 0
        self._on = False
        self._inside = False
        """Whether a backward pass that is counted is running."""
        self._looks = False
        """Whether somebody would stop for a loss."""
        self._keeper: Any = None
        """The probe that has the device keep what gradients come to; None where it cannot, or where that would be too dear."""
        self._update: Update | None = None
        """The update at hand, for it."""
        self._optimizer: Callable[[], Any] = lambda: None
        self._kept = 0
        """The step of which the device keeps something already."""
        self._launch_ns = 0.0
        """Nanoseconds that a launch takes, of the last ones; 0: not known."""

    def decide(self) -> None:
        """After a watched step, once the allowance is used up: leave out what the budget says."""
        machine, session = self._machine, self._machine.session
        if machine.under_way:  # the next step has begun already
            return
        self.due = False
        if not session.budget.binds:
            elapsed = session.clock.monotonic() - session.active.started
            waited = (waited_for_cpu() - self._waited) / elapsed if elapsed > 0 else 0.0
            if session.budget.put_off(session.own_ns, min(MOST_WAITED, max(0.0, waited))):
                return
        announced = machine.announced
        budget, stop = session.budget, machine.stop.state
        budget.shared = session.info.world_size > 1
        budget.whole = not self._possible()
        steps = budget.step_over(machine.number, session.own_ns, session.active())
        if budget.shared and not budget.whole and session.info.speaks and session.controls is not None:
            session.controls.propose_pace(budget.wanted, max(1, budget.common))
        if steps <= 0 or stop.request is not None:
            return
        # Where no optimizer was seen to step, they step inside of the backward pass, or there is none.
        self.by_pass = not announced and (session.unit == "backward" or not machine.optimizers.stepped)
        optimizers = [] if announced or self.by_pass else machine.optimizers.of_last_step()
        if not (announced or self.by_pass or optimizers):
            return
        self._turns = {id(optimizer): index for optimizer, index in optimizers}
        self._known = {id(optimizer): weak(optimizer) for optimizer, _ in optimizers}
        self._stepped.clear()
        self._choose_keeper(optimizers)
        self.single = len(self._turns) == 1
        self.alone = 0
        if self.single and self._keeper is None:
            self._know_alone(optimizers[0][0])
        machine.logged.left_out(machine.number)
        self._looks, self._done, self._on, self.left = session.acts_on_loss, 0, True, steps
        session.judge_now()
        session.wanted.clear()
        if machine.stop.pending:  # somebody has seen something
            self.watch_again()

    def _possible(self) -> bool:
        """Not where ranks cannot agree on the steps, nor where an update shows only after it was made (a compiled region)."""
        machine = self._machine
        if machine.paused or machine.region.made_updates:
            return False
        session = machine.session
        agreement = session.controls.agreement if session.controls is not None else None
        return session.info.world_size == 1 or (agreement is not None and agreement.ready)

    def _choose_keeper(self, optimizers: Sequence[tuple[Any, int]]) -> None:
        """Have gradients measured in steps that are left out, where a device can keep what comes of it within the budget.

        Not under a loss scale, which is taken out of them only before the update or not at all.
        """
        machine, session = self._machine, self._machine.session
        self._keeper = None
        if len(optimizers) != 1 or machine.losses.scale is not None or not session.budget.affords(self._launch_ns):
            return
        optimizer, index = optimizers[0]
        self._keeper = next((p for p in session.board.probes.values() if hasattr(p, "keep_unread")), None)
        self._optimizer = weak(optimizer)
        self._update = Update(machine.view, session.demand, optimizer_index=index)

    def clipping(self) -> None:
        """Gradients are about to be clipped."""
        if self._keeper is not None:
            self.gradients_complete()

    def gradients_complete(self) -> None:
        """Gradients are there, and about to be clipped or used."""
        optimizer, update, machine = self._optimizer(), self._update, self._machine
        step = machine.number + 1
        capturing = machine.events.capturing
        if optimizer is None or update is None or self._kept == step or (capturing is not None and capturing()):
            return
        began = perf_counter_ns()
        self._kept, update.optimizer = step, optimizer
        try:
            if not self._keeper.keep_unread(update, step):
                self._keeper = None
                self._know_alone(optimizer)
        except Exception as error:
            machine.session.monitor_error(error, "gradients_complete")
            self._keeper = None
        update.optimizer = None
        spent = perf_counter_ns() - began
        self._launch_ns += (spent - self._launch_ns) * 0.1 if self._launch_ns else spent
        machine.session.own_ns += spent

    def _know_alone(self, optimizer: Any) -> None:
        """Nothing is asked before updates of an optimizer that steps alone, as long as it lives: its id is given again."""
        with contextlib.suppress(TypeError):  # of a kind that has no weak references
            self._life = weakref.ref(optimizer, self._gone)
            self.alone = id(optimizer)

    def _gone(self, life: weakref.ref[Any]) -> None:
        self.alone = 0

    # -- called by hooks, at every step that is left out -------------------------------

    def draws(self, dataset: Any, *, gradients: bool) -> None:
        """A batch was drawn: for nobody, unless it is the first of an evaluation."""
        evaluations = self._machine.evaluations
        if not evaluations.draws_for_training(dataset, gradients=gradients):
            evaluations.batch()

    def update_begins(self, optimizer: Any) -> bool:
        """An optimizer is about to step. False if this is to be watched after all."""
        if self._keeper is not None:
            self.gradients_complete()
        known = self._known.get(id(optimizer))
        if (known is not None and known() is optimizer) or not self._turns:
            return True
        only = self._machine.optimizers.only
        if only is not None and optimizer not in only:
            return True
        self.watch_again()  # a new one: nobody knows what becomes of the steps
        return False

    def update_ends(self, optimizer: Any) -> None:
        """An update was made, or left out by a loss scaler."""
        turns = self._turns
        if not turns:
            return
        if len(turns) > 1:
            key, stepped = id(optimizer), self._stepped
            if key not in turns:
                return
            repeated = key in stepped
            if repeated:  # the others did not step this time
                stepped.clear()
            stepped.add(key)
            if not repeated:
                if len(stepped) < len(turns):
                    return
                stepped.clear()
        self.step_over()

    def runs(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass that is a step."""
        if self._inside:
            return original(tensors, *args, **kwargs)
        self._inside = True
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            self._inside = False
        self.step_over()
        return result

    def leaves_out(self, tensors: Any) -> bool:
        """Whether nobody need see a backward pass from these tensors. Otherwise the step is watched from here on."""
        evaluations = self._machine.evaluations
        if evaluations.open:
            evaluations.end()
        if not self._looks:
            return True
        try:
            if not tensors.is_cpu:
                return True
            loss = tensors.item()
        except (AttributeError, RuntimeError):  # several tensors or values, or one that has no number
            return True
        if loss - loss == 0.0:
            return True
        self.watch_again()
        return False

    def reports(self, loss: Any, number: int | None) -> bool:
        """A loop or a framework says that its step is over. False if it has a loss that somebody must see."""
        if loss is not None and self._looks:
            value = loss if isinstance(loss, float) else loss.item() if getattr(loss, "is_cpu", False) else 0.0
            if value - value != 0.0:
                self.watch_again()
                return False
        self.step_over(number)
        return True

    def step_over(self, number: int | None = None) -> None:
        """One more is over."""
        machine = self._machine
        session = machine.session
        machine.number = machine.last_attempt = session.step = machine.number + 1 if number is None else number
        if machine.logged.heard:
            machine.logged.left_out(machine.number)
        machine.updates += 1
        session.last_event_at = session.clock.monotonic()
        self._done += 1
        self.left -= 1
        stop = machine.stop.state
        if self.left <= 0 or stop.request is not None:
            self.watch_again()
        if stop.most_steps is not None or stop.most_seconds is not None:
            machine.check_end()

    def watch_again(self) -> None:
        """From now on everything is watched, in the middle of a step perhaps. Does nothing while all is."""
        if not self._on:
            return
        machine, session = self._machine, self._machine.session
        steps, self.left, self._done, self._on, self.alone = self._done, 0, 0, False, 0
        session.own_ns += steps * HOOKS_NS
        session.budget.gap_over(steps, session.own_ns, session.active(), step=machine.number)
        session.board.steps_left_out(machine.number, session.last_event_at)
        if self._stepped:
            # In the middle of a step in which some optimizers have made their update.
            machine.step_begins(machine.number + 1)
            machine.optimizers.stepped.update(self._turns[key] for key in self._stepped)
            machine.last_attempt = machine.number
