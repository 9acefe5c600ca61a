"""What a loop of torch optimizers lets others do: stop it, skip an update, save, slow down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from healthcheck.core.errors import StopTraining, UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities, Device
from healthcheck.instrument.gate import UpdateGate
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.saved_state import new_checkpoint
from healthcheck.probes.memory_readings import TorchDevice
from healthcheck.run.actor import StopState
from healthcheck.run.ending import Ending

if TYPE_CHECKING:
    from healthcheck.run.session import Session

PATIENCE = 3
"""How often a script may swallow the stop before the process is ended from under it."""


class StopSwitch:
    """Raises the stop of a run wherever the adapter asks, until it is heeded.

    :param state: the stop of the session.
    :param give_up: called instead of raising for the fourth time; ends the process. Without it
        (a notebook, a test) the stop is raised for ever.
    :param deferred: see :attr:`deferred`.
    """

    def __init__(self, state: StopState, give_up: Callable[[], None] | None = None, *, deferred: bool = False) -> None:
        self.state = state
        self.give_up = give_up
        self._deferred = deferred

    @property
    def pending(self) -> bool:
        """Whether a stop was requested. On the step path look at ``state.request``, which is no call."""
        return self.state.request is not None

    @property
    def deferred(self) -> bool:
        """True while a loop is asked to end in its own way: nothing is raised, and no update is applied."""
        return self._deferred or self.state.by_framework

    def check(self) -> None:
        """Raise ``StopTraining`` if a stop was requested, unless the loop ends in its own way."""
        if not self._deferred:
            self.insist()

    def insist(self) -> None:
        """Raise ``StopTraining`` if a stop was requested: the loop did not end. A framework is left to its own way."""
        state = self.state
        request = state.request
        if request is None or state.by_framework:
            return
        if state.raised >= PATIENCE and self.give_up is not None:
            self.give_up()
        state.raised += 1
        raise StopTraining(request.reason, rule=request.rule, step=request.step, exit_code=request.exit_code)

    def step_over(self, step: int) -> None:
        """A step has ended: a framework that has made a few since it was asked to stop does not heed that."""
        state = self.state
        if state.request is None:
            return
        if state.by_framework and step - state.request.step > state.patience:
            state.by_framework = False
        self.check()


class AskedEnd:
    """The user's own end, at a step boundary: ``max_steps``, ``max_time``, and Ctrl-C."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began = 0.0

    def training_begins(self) -> None:
        """``max_time`` counts from here: imports and preparation are no training."""
        self._began = self._session.active()

    def check(self, step: int, *, made: int) -> None:
        """Ask for the stop once ``made`` steps of this run, or its time, are enough.

        Raises ``KeyboardInterrupt`` if the user has pressed Ctrl-C during the step.
        """
        session, reason = self._session, ""
        if session.stop.interrupted:
            session.stop.interrupt_is_over()
            raise KeyboardInterrupt
        most_steps, most_seconds = session.stop.most_steps, session.stop.most_seconds
        if most_steps is not None and made >= most_steps:
            reason = f"asked for {most_steps:,} steps"
        # Not with several ranks, whose clocks would not agree.
        elif most_seconds is not None and session.info.world_size == 1 and self._elapsed() >= most_seconds:
            reason = f"asked for {most_seconds:g} s"
        if reason and session.controls is not None:
            session.controls.request_stop(reason, rule="", step=step, mode="graceful", exit_code=0)

    def _elapsed(self) -> float:
        return self._session.active() - self._began


def caused_by_stop(error: BaseException | None) -> bool:
    """Whether an exception is our stop, or was raised while it was being handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StopTraining):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def ending_of(error: BaseException | None) -> Ending:
    """The ending that an exception means; None is a regular end, and so is our own stop."""
    if error is None or caused_by_stop(error):
        return Ending()
    if isinstance(error, KeyboardInterrupt):
        return Ending(interrupted=True)
    if isinstance(error, SystemExit):
        return Ending(script_exit_code=error.code if isinstance(error.code, int) else int(error.code is not None))
    return Ending(exception=error)


# --------------------------------------------------------------------------------------------------
# What actions may do to a loop of torch optimizers: stop, skip, save, slow down.


class PendingUpdate(Protocol):
    """An update that can still be kept from happening."""

    skip: bool


_NO_EPOCHS = "a plain loop does not announce its epochs"
_NO_TESTS = "a plain loop does not distinguish a test from an evaluation"

GAPS = {
    **dict.fromkeys(("epoch_start", "epoch_end"), _NO_EPOCHS),
    **dict.fromkeys(("test_start", "test_step", "test_end"), _NO_TESTS),
}

SCRIPT_EVENTS = frozenset(kind for kind in EventKind if kind.value not in GAPS)


class TorchControls:
    """Implements :class:`healthcheck.core.protocols.Controls` over optimizers and modules found."""

    ranks_cannot_save = "a plain script does not say which rank saves which part"

    def __init__(self, session: Session, view: FoundModel, stop: StopSwitch, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.device: Device = TorchDevice()
        self.stop = stop
        self.update: PendingUpdate | None = None
        """The update at hand, while it is shown and can still be skipped."""
        self.gate = UpdateGate(session)
        self._session = session
        self._view = view

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        """Nothing to ask for: what trains looks at the stop of the run itself, and raises it from its next step."""

    def skip_update(self) -> bool:
        session = self._session
        if self.update is None or (session.info.world_size > 1 and self.gate.alone(session.step)):
            return False
        self.update.skip = True
        return True

    def gated(self, step: int, rule: str) -> bool:
        """Whether this rule's bound decided on the update of that step, before the rule was judged."""
        return self.gate.decided(step, rule)

    def cannot_gate(self, why: str) -> None:
        """Rules want to hold back updates, and this optimizer does not let them: say so, and promise nothing."""
        if not why or self.gate.rules is None:
            return
        known = self.capabilities
        self.capabilities = replace(
            known, controls=known.controls - {"skip_update"}, gaps={**known.gaps, "skip_update": f"cannot gate: {why}"}
        )
        ids = ", ".join(rule.id for rule in self.gate.rules.rules)
        self._session.note(f"cannot gate ({ids} act one or two steps after a bad update): {why}")

    def update_unseen(self, why: str) -> None:
        """Updates are made where nobody can look at their gradients: say so, once, and promise nothing."""
        if self.capabilities.gaps.get("before_update") == why:
            return
        self.capabilities = without_updates(self.capabilities, why)
        self._session.note(f"{why}: its gradients and updates are not seen, and not judged")

    def updates_inside_backward(self) -> None:
        """There is no moment between the gradients and the updates at which somebody could look."""
        known = self.capabilities
        if "before_update" not in known.gaps:
            kinds = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
            gaps = dict.fromkeys((kind.value for kind in kinds), "optimizers step inside the backward pass, one by one")
            self.capabilities = replace(known, events=known.events - set(kinds), gaps={**known.gaps, **gaps})

    def scale_lr(self, factor: float) -> list[float]:
        rates = []
        for optimizer in self._view.optimizers():
            for group in optimizer.param_groups:
                if hasattr(group["lr"], "mul_"):  # a tensor that a captured graph reads: keep its address
                    group["lr"].mul_(factor)
                else:
                    group["lr"] = group["lr"] * factor
                rates.append(float(group["lr"]))
        return rates

    def request_checkpoint(self, path: Path | None = None) -> str:
        """Write modules and optimizers as state dicts, now: between two updates is a safe point.

        Raises ``UsageError`` where there is nothing to save, nowhere to put it, or a file already.
        """
        roots = self._view.roots()
        if not roots:
            raise UsageError("no module was found to save")
        step = self._session.step
        path = new_checkpoint(self._session, path, f"step-{step}.pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        import torch

        content = {
            "step": step,
            "modules": [root.state_dict() for root in roots],
            "optimizers": [optimizer.state_dict() for optimizer in self._view.optimizers()],
        }
        save = getattr(torch.save, "__wrapped__", torch.save)  # our own checkpoint is no event of the script
        unfinished = path.with_suffix(path.suffix + ".part")
        save(content, unfinished)
        unfinished.replace(path)
        return str(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """A plain loop has no logger of its own that we know of."""


def without_updates(known: Capabilities, why: str) -> Capabilities:
    """What is left to a trainer whose updates nobody sees."""
    unseen = (EventKind.BACKWARD_END, EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    return replace(
        known,
        events=known.events - set(unseen),
        controls=known.controls - {"skip_update"},
        gaps={**known.gaps, **dict.fromkeys([kind.value for kind in unseen] + ["skip_update"], why)},
    )


def capabilities_of(trainer: str, gaps: Mapping[str, str] | None = None) -> Capabilities:
    return Capabilities(
        trainer=trainer,
        events=SCRIPT_EVENTS,
        controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr"}),
        gaps={**GAPS, "log": "a plain loop has no logger that is known here", **(gaps or {})},
    )
