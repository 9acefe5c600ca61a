"""Steps that nobody sees as they are made: optimizers inside of a backward pass or of a compiled region, and scripts
without any.

They happen in few trainings, and are known by their traces, so they stand beside the step machine, whose steps they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.events import EventKind
from healthcheck.device.tensors import no_grad
from healthcheck.instrument.compiled import RegionNotes
from healthcheck.instrument.controls import TorchControls
from healthcheck.instrument.gate import UpdateGate
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_events import Stage, StepEvents
from healthcheck.instrument.step_rows import StepNotes, UpdateFacts
from healthcheck.instrument.updates import InnerUpdates, Optimizers, Running, UnattemptedUpdates, UpdatePlan

if TYPE_CHECKING:
    from healthcheck.run.session import Session


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
    def update_over(self, optimizer: Any, index: int, skipped: bool | None) -> None: ...
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
    machine.update_over(optimizer, plan.index, None)


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
