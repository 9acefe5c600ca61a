"""Optimizers and their updates: whose turn it is, how an update is held back while it is made, and the odd ways of making one."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import EventKind
from healthcheck.core.rows import Update
from healthcheck.device.tensors import no_grad
from healthcheck.instrument.gate import has_state
from healthcheck.instrument.guarding import contain, guarded
from healthcheck.instrument.modelview import FoundModel, living, parameters_of
from healthcheck.instrument.step_events import StepEvents
from healthcheck.instrument.step_rows import StepNotes, UpdateFacts
from healthcheck.probes.gradient_statistics import HeldGradients, InnerGradients, InnerPass

if TYPE_CHECKING:
    from healthcheck.instrument.controls import TorchControls
    from healthcheck.run.session import Session

PARAMS = operator.itemgetter("params")


@dataclass(slots=True)
class UpdatePlan:
    """What there is to know about the updates of one optimizer before each of them.

    Made once, and used until the optimizer's groups change. Which events are worth building is kept by the session for
    each step (``session.wanted``).
    """

    optimizer: weakref.ref[Any]
    index: int
    """0 for the optimizer seen first."""
    sizes: tuple[int, ...]
    """Parameters in each of its groups: what this was made for."""
    way: str
    """How rules can hold its updates back (:meth:`UpdateGate.way`)."""
    parameters: frozenset[int]
    """Ids of its parameters."""
    update: Update
    """Shown to probes that look at every update, one object for all of them. Holds the optimizer only meanwhile."""


def sizes_of(optimizer: Any) -> tuple[int, ...]:
    """Parameters in each group of an optimizer."""
    return tuple(map(len, map(PARAMS, optimizer.param_groups)))


_PAST: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of runs in this process that are over. Some outlive them, by a hook, a notebook or a fixture."""


class Optimizers:
    """The optimizers of one run, and whose turn it is in a step. They are known by weak references alone.

    A step is over when the optimizers that stepped in the step before have all stepped again; the first is over when all
    that live have stepped.

    :param only: those to look at; None for all.
    :param met: called with an optimizer that steps for the first time.
    :param way: how rules can hold back the updates of an optimizer.
    """

    def __init__(
        self,
        view: FoundModel,
        only: Iterable[Any] | None,
        session: Session,
        *,
        met: Callable[[Any], None],
        way: Callable[[Any], str],
    ) -> None:
        self.only: weakref.WeakSet[Any] | None = None if only is None else weakref.WeakSet(only)
        self.stepped: set[int] = set()
        """Indices of those that have stepped in this step."""
        self.living = 1
        """How many there were when training began; those that share parameters count once."""
        self.expected: set[int] | None = None
        """Those that stepped in the step before; None in the first, which is over when all that live have stepped."""
        self._view = view
        self._met = met
        self._way = way
        self._session = session
        self.plans: dict[int, UpdatePlan] = {}
        """By the id of the optimizer; one that is gone takes its plan with it."""
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        """How many have stepped and are still there."""
        return len(self.plans)

    def watch_only(self, optimizers: Iterable[Any] | None) -> Iterable[Any] | None:
        """Look at these from now on, None for all; returns those before."""
        before, self.only = self.only, None if optimizers is None else weakref.WeakSet(optimizers)
        return before

    def look_around(self) -> None:
        """Get to know what there is to train, before the first event."""
        modules: list[Any] | None = None
        if self.only is None:
            alive, modules = living()
            optimizers = [o for o in alive if o not in _PAST]
        else:
            optimizers = list(self.only)
        self._seen.update(optimizers)
        self.living = len({id(parameters_of(o)[0]) for o in optimizers if parameters_of(o)})
        self._view.scan(optimizers, modules)

    def forget(self) -> None:
        """Another training begins, with optimizers of its own."""
        self.stepped, self.expected = set(), None
        self.plans.clear()
        self._view.forget_optimizers()

    def retire(self) -> None:
        """The run is over. What is left of its optimizers is none of the next one's, until it steps again."""
        _PAST.update(self._seen)

    def of_last_step(self) -> list[tuple[Any, int]]:
        """Those that stepped in the step that is under way or was the last, with their indices."""
        known = [(plan.optimizer(), plan.index) for plan in self.plans.values() if plan.index in self.stepped]
        return [(optimizer, index) for optimizer, index in known if optimizer is not None]

    # -- plans ------------------------------------------------------------------------

    def plan(self, optimizer: Any) -> UpdatePlan:
        """What is to be done about an update of this optimizer."""
        plan = self.plans.get(id(optimizer))
        if plan is None or plan.optimizer() is not optimizer:
            return self._meet(optimizer)
        return plan if plan.sizes == sizes_of(optimizer) else self._make_plan(optimizer, plan.index)

    def _meet(self, optimizer: Any) -> UpdatePlan:
        if self.plans and not self.stepped:
            # Samples that wait to be judged may hold on to an optimizer that the script has let go. Where another one has
            # stepped in this step they take turns, and what kind of run it is may not be decided before all have.
            self._session.judge_now()
        # Those that are gone have left their numbers.
        taken = {plan.index for plan in self.plans.values()}
        index = next(i for i in itertools.count() if i not in taken)
        self._seen.add(optimizer)
        _PAST.discard(optimizer)
        self._view.add_optimizer(optimizer)
        self._met(optimizer)
        return self._make_plan(optimizer, index)

    def _make_plan(self, optimizer: Any, index: int) -> UpdatePlan:
        ids = frozenset(map(id, parameters_of(optimizer)))
        update = Update(self._view, self._session.demand, optimizer_index=index)
        key = id(optimizer)
        alive = weakref.ref(optimizer, lambda _: self.plans.pop(key, None))
        plan = UpdatePlan(alive, index, sizes_of(optimizer), self._way(optimizer), ids, update)
        self.plans[key] = plan
        return plan

    def trains(self, parameters: Sequence[Any]) -> bool:
        """Whether one of these parameters belongs to an optimizer that is looked at."""
        if self.only is None:
            return True
        for optimizer in self.only:
            plan = self.plans.get(id(optimizer))
            if (
                plan is not None
                and plan.optimizer() is optimizer
                and plan.sizes == sizes_of(optimizer)
                and not plan.parameters.isdisjoint(map(id, parameters))  # ends at the first that is there
            ):
                return True
        # Not among those of the plans: an optimizer is new, or its parameters have been exchanged.
        ids = set(map(id, parameters))
        return any(not ids.isdisjoint(map(id, parameters_of(optimizer))) for optimizer in self.only)


# --------------------------------------------------------------------------------------------------
# One update: how it is kept from happening while that can be done, and the odd ways of making one.


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
        session, notes, capturing = self._session, self._notes, self._events.capturing
        if capturing is None or not capturing():
            limits = self._gate.device_limits(0, step)  # whoever will use them: nearly always the first optimizer
            update = Update(self._events.view, session.demand, final=False, limits=limits)
            notes.look(notes.complete(step, facts), update)

    def after(self, optimizer: Any, running: Running) -> None:
        """Its step is over: leave the optimizer and its gradients as they were found."""
        if running.armed:
            self._gate.disarm(optimizer)
        if running.withheld is not None:
            running.withheld.give_back()


def with_closure(
    closure: Callable[..., Any], evaluated: Callable[[], None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an optimizer's step, with a closure that says when it was evaluated."""

    def watched_closure(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        evaluated()
        return result

    if len(args) > 1:
        return (args[0], watched_closure, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": watched_closure}


def found_inf_on_host(optimizer: Any) -> bool:
    """Whether a ``GradScaler`` drives a fused step that will not be applied; False where only the device knows."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and getattr(getattr(found, "device", None), "type", "") == "cpu" and bool(found)


# -- odd ways of making an update


class InnerUpdates:
    """The updates of optimizers that step inside the backward pass, one for each parameter: the pass is the step.

    They are made while other gradients of the pass do not exist yet. Each gradient is measured before it is gone; what
    they were together is known when the pass is over.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gradients = InnerGradients(session.demand)
        self.first: weakref.ref[Any] | None = None
        """The optimizer that stepped first in this pass; None while none did."""

    def made(self, optimizer: Any, step: int) -> None:
        """An optimizer is about to use its gradients and to throw them away."""
        if self.first is None:
            self.first = weakref.ref(optimizer)
        with no_grad():
            guarded(self._session, self._gradients.take, optimizer, step)

    def end(self, view: FoundModel, step: int) -> tuple[Any, InnerPass | None]:
        """The pass is over. Returns the optimizer that stepped first, and what was measured of the gradients."""
        assert self.first is not None
        optimizer, self.first = self.first(), None
        with no_grad():
            found = guarded(self._session, self._gradients.result, view.named_parameters())
        return optimizer, None if found is None else InnerPass(step, *found)


CYCLES = 3
"""Gradients made and thrown away without an attempt so often: nobody is going to step."""
MANY = 128
"""Backward passes without any attempt, where gradients are not seen to be thrown away. More than
any usual accumulation."""


class UnattemptedUpdates:
    """Tells long accumulation from a script whose backward passes lead to no optimizer step at all.

    A gradient that has become ``None`` by the next backward pass was thrown away by the script.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.counts_passes = False
        """True once backward passes have to serve as steps."""
        self._cycles = 0
        self._fresh = False
        self._witness: weakref.ref[Any] | None = None
        """A parameter that had a gradient."""

    def pass_begins(self) -> None:
        self.passes += 1
        if self._fresh and self._witness is not None:
            parameter = self._witness()
            if parameter is not None and parameter.grad is None:
                self._cycles += 1

    def pass_ends(self, view: FoundModel, optimizers: int) -> None:
        """:param optimizers: how many live; without any, the script updates by hand."""
        self._fresh = True
        witness = self._witness() if self._witness is not None else None
        if witness is None or witness.grad is None:
            with_gradient = next((p for _, p in view.named_parameters() if p.grad is not None), None)
            self._witness = weakref.ref(with_gradient) if with_gradient is not None else None
        if not optimizers or self._cycles >= CYCLES or self.passes >= MANY:
            self.counts_passes = True
