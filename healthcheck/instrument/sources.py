"""What feeds the step machine besides the hooks in torch: a loop of one's own, and a framework that announces its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from healthcheck.core.samples import Sample
from healthcheck.device.tensors import on_host
from healthcheck.instrument.controls import TorchControls
from healthcheck.instrument.gate import why_not_gateable
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.step_rows import LossMath
from healthcheck.probes.labels import optimizer_labels


class PassLosses:
    """The loss of a loop that reports its own only after the update: what its backward passes started from.

    Only for the gate. What a rule judges and a report shows is what the loop reports.

    :param math: takes loss scales and divisors out, as for a script.
    """

    def __init__(self, math: LossMath) -> None:
        self._math = math
        self._update = -1
        self._now: Any = None
        self._weight: float | None = None
        self._marks: list[tuple[Any, int]] = []
        self._sum: Any = None
        self._parts = 0

    def pass_begins(self, tensors: Any, optimizers: Iterable[Any], update: int) -> None:
        """A backward pass from ``tensors`` is about to run; only those for the same ``update`` belong together."""
        if update != self._update:
            self._update, self._sum, self._parts = update, None, 0
        loss = self._math.of(tensors, update)
        self._now = loss if loss is None or not on_host(loss) else float(loss)
        self._weight = self._math.weight
        self._marks = _marks(optimizers)

    def pass_ends(self, optimizers: Iterable[Any]) -> None:
        """It is over. One that left the gradients of these optimizers alone is of another model."""
        if self._now is not None and _marks(optimizers) != self._marks:
            value = self._now if self._weight in (None, 1.0) else self._now * self._weight
            self._sum = value if self._sum is None else self._sum + value
            self._parts += 1
        self._now, self._marks = None, []

    def take(self) -> Any:
        """Loss of the update at hand: a float, or a 0-dim device tensor; None if none was seen. Forgets it."""
        value, parts = self._sum, self._parts
        self._sum, self._parts = None, 0
        if value is None or parts < 2 or self._weight is not None:
            return value
        return value / parts


def _marks(optimizers: Iterable[Any]) -> list[tuple[int, int]]:
    """What changes when a backward pass reaches an optimizer: its outermost gradients, and how often they were written."""
    marks = []
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.param_groups if group["params"]]
        for parameter in (groups[0][0], groups[-1][-1]) if groups else ():
            gradient = parameter.grad
            marks.append((0, 0) if gradient is None else (id(gradient), gradient._version))
    return marks


class LoopSource:
    """A loop under ``watch``: it says when a step is over, and reports its loss after the update.

    Its optimizers are seen as in a script. Its backward passes are of use only before the update: they show the loss that
    a rule may skip the update for, and optimizers may step inside of them. Passes of other models in the same process are
    none of its business, so that no step begins with a pass.
    """

    def __init__(self, machine: StepMachine) -> None:
        self.machine = machine
        self._passes = PassLosses(machine.losses)
        self._pass_loss: Any = None
        """The loss that a backward pass showed, for a loop that reports none."""
        self._reports_loss = False
        machine.when_gradients_are_final(self._gate_on_loss)

    def needs_passes(self, optimizers: int) -> bool:
        """Whether somebody needs the backward passes: rules that skip an update for its loss, or optimizers that may
        step inside of a pass (one for each parameter).
        """
        rules = self.machine.session.rules.causes
        return optimizers > 1 or any(r.selector.metric == "loss" and not why_not_gateable(r) for r in rules)

    def pass_begins(self, tensors: Any) -> None:
        self.machine.pass_enters()
        if self._looks_at_passes():
            self._passes.pass_begins(tensors, self.machine.optimizers.only or (), self.machine.updates)

    def pass_fails(self) -> None:
        self.machine.pass_fails()

    def pass_ends(self) -> None:
        self.machine.pass_ends()
        if self._looks_at_passes():
            self._passes.pass_ends(self.machine.optimizers.only or ())

    def _looks_at_passes(self) -> bool:
        """Whether the loss of a pass is of use: to skip an update, or because the loop reports none."""
        return not (self._reports_loss and self.machine.gate.nothing_held)

    def _gate_on_loss(self, index: int) -> None:
        """Until the loop reports its loss, that of its backward passes stands for it."""
        machine = self.machine
        if not machine.gate.wants_loss():
            return
        loss = self._pass_loss = self._passes.take()
        if loss is None:
            return
        if machine.gate.waits:
            loss = float(loss)  # the gate waits for the device anyway
        machine.gate.see([Sample("loss", machine.number, loss, optimizer_labels(index))])

    def step(
        self,
        *,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        samples: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """The loop says that one update is over."""
        if self.machine.unwatched.left and self.machine.unwatched.reports(loss, None):
            return
        pass_loss, self._pass_loss = self._pass_loss, None
        self._reports_loss = loss is not None
        loss = pass_loss if loss is None else loss
        self.machine.step_ends(loss=loss, losses=losses, metrics=metrics, n_tokens=tokens, n_samples=samples)
        if self.machine.unwatched.due:
            self.machine.unwatched.decide()


class AnnouncedSource:
    """A framework that says when an update begins and ends, and what came of it: the numbers are its own.

    What torch shows in between goes into the step under way. It is kept before what the framework says afterwards: a loss
    that was differentiated is known before the update, its reported average only after it.
    """

    def __init__(self, machine: StepMachine) -> None:
        self.machine = machine

    def watches(self, optimizer: Any) -> bool:
        """Whether this optimizer is looked at."""
        only = self.machine.optimizers.only
        return only is not None and optimizer in only

    @property
    def under_way(self) -> bool:
        """True between the beginning of a step and its end."""
        return self.machine.under_way or self.machine.unwatched.left > 0

    def begins(self, step: int) -> None:
        """Update number ``step`` (from 1) begins, unless it has begun with its data already."""
        if not self.machine.unwatched.left:
            self.machine.step_begins(step)

    def ends(
        self,
        step: int,
        *,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        grad_norm: Any = None,
        max_norm: float | None = None,
        lr: Any = None,
        tokens: Any = None,
        samples: int | None = None,
        skipped: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Update number ``step`` is over.

        :param loss: of the whole step; a number or a scalar tensor, which is not read here.
        :param grad_norm: L2 norm before clipping.
        :param skipped: True if the framework did not apply the update.
        """
        if self.machine.unwatched.left and self.machine.unwatched.reports(loss, step):
            return
        if not self.machine.optimizers.only:  # no optimizer is looked at: that it was made is the framework's word
            skipped = bool(skipped)
        self.machine.step_ends(
            number=step,
            loss=loss,
            losses=losses,
            loss_weight=1.0,
            grad_norm=grad_norm,
            max_norm=max_norm,
            skipped=skipped,
            lr=lr,
            metrics=metrics,
            n_tokens=tokens,
            n_samples=samples,
        )
        if self.machine.unwatched.due:
            self.machine.unwatched.decide()

    # -- a framework that wraps the step of its optimizers ----------------------------

    def update_begins(self, optimizer: Any) -> bool:
        """Gradients of this optimizer are final. False if the update is to be left out: call :meth:`update_ends` then."""
        if self.machine.unwatched.left:
            return True
        self.machine.update_begins(optimizer, announced=True)
        return not self.machine.updates_withheld

    def update_ends(self, optimizer: Any) -> None:
        """The update was made, or left out."""
        self.machine.update_ends(optimizer)

    def update_fails(self, optimizer: Any) -> None:
        """The update was left by an exception, or never made."""
        self.machine.update_fails(optimizer)


class Framework(Protocol):
    """The part of a framework's adapter that others ask about."""

    @property
    def active(self) -> bool: ...


@dataclass(slots=True)
class TorchFeed:
    """What feeds a session from torch, for adapters that join it."""

    machine: StepMachine
    controls: TorchControls
    shared: bool = False
    """True if it sees every optimizer of the process (a script), so that a framework need not hook again."""
    framework: Framework | None = None
    """The framework that is training now, if one is."""
    several: bool = False
    """True once the user knows that steps are counted on over several trainings."""
