"""What a step came to, in one row of plain values. Standard library only.

Most steps of a training are like the one before. Nobody has to hear of each of them while it happens: what there is to
say is noted in a :class:`StepRow`, and probes that have ``sample_rows`` turn rows into samples, many at a time. What has
to be looked at while it is there, a probe looks at in ``look`` (the gradients above all) or in ``look_at_batch``, and leaves in
:attr:`StepRow.found` what it needs later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.events import ModelView
from healthcheck.core.protocols import Demand

_NUMBERS = ("loss", "grad_norm", "loss_scale")
"""What may still be on a device, beside the flags of :attr:`StepRow.held_back`."""


def _nothing() -> None:
    return None


@dataclass(slots=True)
class StepRow:
    """One attempted update, or the end of a step, or both at once: a step of a training with one optimizer is one row.

    Of several optimizers in a step each has a row of its own, and the last of them ends the step. Times are seconds of
    active training, as in samples.
    """

    step: int
    optimizer_index: int = 0
    """0 for the optimizer seen first; others count up in the order of their first step."""
    attempted: bool = False
    """Whether an optimizer stepped, or was skipped."""
    seen: bool = False
    """Whether its gradients were there to be seen. A step that a ``GradScaler`` skips shows none."""
    ends: bool = False
    """Whether the step is over with it."""
    over: bool = False
    """False for a row that is not finished: it comes once more when it is. Only probes that look before the update are
    asked about such a row, when a rule has to know of the update before it is made."""

    time: float = 0.0
    """End of the update or the step."""
    update_time: float = 0.0
    """When gradients were final."""
    origin: float = 0.0
    """Clock reading from which active seconds count: ``time + origin`` is a reading of ``time.monotonic``."""

    passes: list[float] = field(default_factory=list)
    """When each backward pass of the row began, or when a loop reported its loss."""
    loss: Any = None
    """Of all passes together: a float, a deferred number (:mod:`healthcheck.device.deferred`), None if none was seen."""
    parts: int = 0
    """Passes whose loss is in it."""
    averaged: bool = False
    """Whether losses of several passes are averaged, and not added up."""
    rates: Sequence[Any] = ()
    """Learning rates of the optimizer's groups just before the update: floats or deferred numbers; None where a group has
    none."""
    lr: Any = None
    """Learning rate, where a framework tells one instead of showing its optimizer."""
    norm: float | None = None
    """L2 norm of the gradients just before the update, or before the loop clipped them, where a probe has measured it and
    the host knows it."""
    breach: Any = None
    """Of an update with :attr:`Update.limits`: 1 if one of them is broken, else 0. A 0-dim float32 tensor on the device, until
    the next step, and the same as a deferred number. None where nobody has compared them."""
    alarming: bool = False
    """Whether the host knows that loss or gradients are not finite."""
    grad_norm: Any = None
    """As in an :class:`~healthcheck.core.events.Event`, and so are those that follow."""
    facts: int = 0
    """How often something was said of the update (norm, threshold, loss scale) up to what this row has of it."""
    max_norm: float | None = None
    clipped_scaled: bool | None = None
    loss_scale: Any = None
    skipped: bool | None = None
    held_back: Mapping[int, Any] | None = None
    collectives: tuple[float, float, float, float] | None = None
    """With several ranks: when the forward pass of a DDP wrapper began (0: it was not seen) and the backward pass ended, readings
    of ``time.monotonic``; seconds inside of collectives, and on the way to them."""
    data_wait: float | None = None
    n_samples: int | None = None
    n_tokens: int | None = None
    max_steps: int | None = None
    optimizer: Callable[[], Any] = _nothing
    """A weak reference."""
    found: dict[str, Any] = field(default_factory=dict)
    """What probes found in ``look``, by their names."""
    numbers: Any = None
    """A vector that a device writes to the host itself, with what it has measured of the update: of this row loss and
    :attr:`grad_norm` may be among them, and flags of :attr:`held_back`. None once it has arrived."""
    late: list[Any] = field(default_factory=list)
    """Other deferred numbers and vectors of the row that are still on a device: they are sent to the host together."""

    def arrived(self) -> None:
        """What has come from a device by now is a float from now on: who asks for it has less to do."""
        for name in _NUMBERS:
            number = getattr(self, name)
            if type(number) is not float and getattr(number, "here", False):
                setattr(self, name, number.value())
        if self.held_back is not None:
            self.held_back = {index: _float(flag) for index, flag in self.held_back.items()}


def _float(number: Any) -> Any:
    return number.value() if getattr(number, "here", False) else number


@dataclass(slots=True)
class Update:
    """An update that is about to be made, for probes that look at it. One object for all updates of an optimizer."""

    model: ModelView
    demand: Demand
    """What the rules want; ``due_now`` is of this step."""
    optimizer: Any = None
    """None where gradients are complete and it is not known yet who will use them."""
    optimizer_index: int = 0
    final: bool = True
    """False before the loop clips: gradients are complete, but will be changed."""
    kept_gradients: Any = None
    """As in an :class:`~healthcheck.core.events.Event`."""
    limits: tuple[float, float, float, float] | None = None
    """Where a device decides whether the update is made: what the loss must be at least and at most, then the norm of the
    gradients. Whoever measures them there compares them, and leaves the answer in :attr:`StepRow.breach`."""


@dataclass(slots=True)
class UsedBatch:
    """The batch of a backward pass that begins, for probes that look at every one. One object for all of them."""

    demand: Demand
    """What the rules want; ``due_now`` is of this step."""
    tensors: Sequence[tuple[str, Any]] = ()
    """Its tensors, with the path to each."""
    rows: Callable[[], int | None] = _nothing
    """How many rows there are to draw from; None where no loader was seen, or where its data set does not know."""
