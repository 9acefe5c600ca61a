"""Steps that nobody sees as they are made: optimizers inside of a backward pass or of a compiled region, and scripts
without any.

They happen in few trainings, and are known by their traces, so they stand beside the step machine, whose steps they are.
"""

from __future__ import annotations

from typing import Any

from healthcheck.core.events import EventKind
from healthcheck.device.tensors import no_grad
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.step_events import Stage

StepMachine = Any
"""The machine itself, which imports this file."""


def catch_up(machine: StepMachine) -> None:
    """Count an update that a compiled region made, step and all; nobody saw its gradients as they were used."""
    region, only = machine.region, machine.optimizers.only
    optimizer, region.stepped = region.stepped, None
    if optimizer is None or (only is not None and optimizer not in only):
        return
    plan = machine._attempt(optimizer)
    region.made_updates = True
    region.take_clipping(machine.facts)
    machine.controls.update_unseen(f"the step of {type(optimizer).__name__} is compiled into a larger graph")
    machine._update_over(optimizer, plan.index, None)


def update_inside_pass(machine: StepMachine, optimizer: Any) -> None:
    """One optimizer per parameter, stepping while gradients are still being made: one pass is one step."""
    if machine.inner.first is None:
        machine.start()
        if not machine.under_way:
            machine._begin_step()
        machine.unattempted, machine.notes.on = None, False
        machine.last_attempt = machine.number
        machine.session.unit = "step"
        machine.controls.updates_inside_backward()
        guarded(machine.session, machine.controls.cannot_gate, machine.gate.cannot(optimizer, inside=True))
    machine._running.pop(id(optimizer), None)  # of a step that raised
    machine.inner.made(optimizer, machine.number)


def pass_ends(machine: StepMachine) -> None:
    """A backward pass is over in which optimizers have stepped, or after which none ever has."""
    if machine.inner.first is not None:  # it was the step
        optimizer, machine.facts.inner_gradients = machine.inner.end(machine.view, machine.number)
        machine.updates += 1
        if machine.announced:
            machine.facts.made(optimizer, 0, None)
        else:
            machine._end_step(optimizer, 0)
    elif machine.unattempted is not None:
        _end_pass_without_updates(machine)


def _end_pass_without_updates(machine: StepMachine) -> None:
    """No optimizer has ever stepped: if none is going to, a pass has to serve as a step."""
    unattempted, session = machine.unattempted, machine.session
    assert unattempted is not None
    unattempted.pass_ends(machine.view, machine.optimizers.living)
    if not unattempted.counts_passes or machine.stage is not Stage.FORWARD:
        return
    if session.unit != "backward":
        session.unit = "backward"
        machine.number = max(machine.number, machine._first + unattempted.passes)
        session.begin_step(machine.number)
    machine.last_attempt = machine.number
    with no_grad():
        machine.events.emit(EventKind.BACKWARD_END, machine.number)
    machine._end_step(None, 0)
