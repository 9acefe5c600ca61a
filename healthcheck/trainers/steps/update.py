"""One update: how it is kept from happening while that can be done, and the odd ways of making one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.events import EventKind
from healthcheck.probes.gradient_statistics import HeldGradients, InnerGradients, InnerPass
from healthcheck.probes.transfer.tensors import no_grad
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.modelview import FoundModel, parameters_of
from healthcheck.trainers.steps.optimizers import UpdatePlan
from healthcheck.trainers.steps.showing import StepEvents, UpdateFacts

if TYPE_CHECKING:
    from healthcheck.session import Session
    from healthcheck.trainers.controls import TorchControls


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

    In one of two ways: the device decides (``found_inf``, see :class:`~healthcheck.trainers.gating.UpdateGate`), or the
    optimizer finds no gradients.
    """

    def __init__(self, session: Session, controls: TorchControls, events: StepEvents) -> None:
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
        session, controls, gate, stop = self._session, self._controls, self._gate, self._stop
        capturing = self._events.capturing
        gated = plan.gated and seen and not (capturing is not None and capturing())
        way = gate.way(optimizer) if gated else "none"
        # Whoever looks at gradients first keeps their Python objects for the others, and for the optimizer.
        gradients = facts.kept_gradients = HeldGradients()
        controls.update, gate.waits = running, way == "wait"
        try:
            if seen:
                with no_grad():
                    if self.on_final_gradients is not None:
                        guarded(session, self.on_final_gradients, plan.index)
                    kinds = _FINAL if facts.backward_ended else _COMPLETE_AND_FINAL
                    facts.backward_ended = True
                    self._events.show(kinds, step, facts, optimizer, plan.index)
        finally:
            controls.update, gate.waits, facts.kept_gradients = None, False, None
        if gradients.small:
            running.gradients = gradients
        if stop.state.request is not None:
            stop.check()
        if way == "device":
            running.armed = True
            guarded(session, gate.arm, optimizer, plan.index)
        elif way != "none" and guarded(session, gate.breached, plan.index):
            running.skip = True
        if running.skip or (stop.state.request is not None and stop.deferred):
            running.withheld = WithheldGradients.of(optimizer)

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
