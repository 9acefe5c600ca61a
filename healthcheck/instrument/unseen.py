"""Steps that nobody sees as they are made: optimizers inside of a backward pass or of a compiled region, updates that a scaler
skips, and scripts without any optimizer.

They happen in few trainings, and are known by their traces, so they stand beside the step machine, whose steps they are.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.events import EventKind
from healthcheck.device.tensors import no_grad
from healthcheck.instrument.compiled import RegionNotes
from healthcheck.instrument.controls import TorchControls
from healthcheck.instrument.gate import UpdateGate
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_events import Running, Stage, StepEvents
from healthcheck.instrument.step_rows import StepNotes, UpdateFacts
from healthcheck.instrument.updates import Optimizers, UpdatePlan
from healthcheck.probes.gradient_statistics import InnerGradients, InnerPass

if TYPE_CHECKING:
    from healthcheck.run.session import Session


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


class Steps(Protocol):
    """What is used here of :class:`~healthcheck.instrument.machine.StepMachine`."""

    session: Session
    view: FoundModel
    controls: TorchControls
    gate: UpdateGate
    optimizers: Optimizers
    events: StepEvents
    notes: StepNotes
    region: RegionNotes
    inner: InnerUpdates
    unattempted: UnattemptedUpdates | None
    facts: UpdateFacts
    running: dict[int, Running]
    announced: bool
    number: int
    last_attempt: int
    began_after: int
    updates: int

    @property
    def stage(self) -> Stage: ...
    @property
    def under_way(self) -> bool: ...
    def start(self) -> None: ...
    def begin_step(self) -> None: ...
    def attempt(self, optimizer: Any) -> UpdatePlan: ...
    def update_ends(self, optimizer: Any, index: int = -1, *, skipped: bool | None = None) -> None: ...
    def end_step(self, optimizer: Any, index: int) -> None: ...


def catch_up(machine: Steps) -> None:
    """Count an update that a compiled region made, step and all; nobody saw its gradients as they were used."""
    region, only = machine.region, machine.optimizers.only
    optimizer, region.stepped = region.stepped, None
    if optimizer is None or (only is not None and optimizer not in only):
        return
    plan = machine.attempt(optimizer)
    region.made_updates = True
    region.take_clipping(machine.facts)
    machine.controls.update_unseen(f"the step of {type(optimizer).__name__} is compiled into a larger graph")
    machine.update_ends(optimizer, plan.index)


def update_skipped(machine: Steps, optimizer: Any, scale: Any) -> None:
    """A ``GradScaler`` found non-finite gradients and did not step."""
    only = machine.optimizers.only
    if only is not None and optimizer not in only:
        return
    if machine.controls.stop.state.request is not None:
        machine.controls.stop.check()
    plan = machine.attempt(optimizer)
    machine.facts.take(loss_scale=scale)
    machine.update_ends(optimizer, plan.index, skipped=True)


def update_inside_pass(machine: Steps, optimizer: Any) -> None:
    """One optimizer per parameter, stepping while gradients are still being made: one pass is one step."""
    if machine.inner.first is None:
        machine.start()
        if not machine.under_way:
            machine.begin_step()
        machine.unattempted, machine.notes.on = None, False
        machine.last_attempt = machine.number
        machine.session.unit = "step"
        machine.controls.updates_inside_backward()
        guarded(machine.session, machine.controls.cannot_gate, machine.gate.cannot(optimizer, inside=True))
    machine.running.pop(id(optimizer), None)  # of a step that raised
    machine.inner.made(optimizer, machine.number)


def pass_ends(machine: Steps) -> None:
    """A backward pass is over in which optimizers have stepped, or after which none ever has."""
    if machine.inner.first is not None:  # it was the step
        optimizer, machine.facts.inner_gradients = machine.inner.end(machine.view, machine.number)
        machine.updates += 1
        if machine.announced:
            machine.facts.made(optimizer, 0, None)
        else:
            machine.end_step(optimizer, 0)
    elif machine.unattempted is not None:
        _end_pass_without_updates(machine)


def _end_pass_without_updates(machine: Steps) -> None:
    """No optimizer has ever stepped: if none is going to, a pass has to serve as a step."""
    unattempted, session = machine.unattempted, machine.session
    assert unattempted is not None
    unattempted.pass_ends(machine.view, machine.optimizers.living)
    if not unattempted.counts_passes or machine.stage is not Stage.FORWARD:
        return
    if session.unit != "backward":
        session.unit = "backward"
        machine.number = max(machine.number, machine.began_after + unattempted.passes)
        session.begin_step(machine.number)
    machine.last_attempt = machine.number
    with no_grad():
        machine.events.emit(EventKind.BACKWARD_END, machine.number)
    machine.end_step(None, 0)
