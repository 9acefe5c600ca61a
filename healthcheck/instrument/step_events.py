"""A step as it is shown: where a training is, what is known of the update at hand, its loss, and the events of it."""

from __future__ import annotations

import enum
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import Event, EventKind
from healthcheck.device.tensors import on_host
from healthcheck.instrument.data import batch_counts, length_of
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_rows import StepNotes, UpdateFacts

if TYPE_CHECKING:
    from healthcheck.run.session import Session


class Stage(enum.Enum):
    """Where a training is.

    ::

        IDLE -> FORWARD -> BACKWARD -> FORWARD -> UPDATING -> ENDED -> FORWARD -> ...

    Passes and updates may lie inside each other: a closure differentiates inside of an update. An optimizer that steps
    less often than others may make its pass and its update after the step has ended: BACKWARD and UPDATING lead back to
    where they came from.
    """

    IDLE = "idle"
    """No step has begun."""
    FORWARD = "forward"
    """A step is under way, and neither a backward pass nor an update is running."""
    BACKWARD = "backward"
    """Inside a backward pass."""
    UPDATING = "updating"
    """Inside an optimizer's step."""
    ENDED = "ended"
    """The last step is over, the next has not begun."""


class EndedBy(enum.Enum):
    """Who says when a step is over."""

    UPDATES = "updates"
    """Nobody: it is over when its optimizers have stepped."""
    LOOP = "loop"
    """A loop says so, and we count."""
    FRAMEWORK = "framework"
    """A framework says so, and counts."""


class StepEvents:
    """Builds the events of steps and hands them to the session."""

    def __init__(self, session: Session, view: FoundModel, notes: StepNotes) -> None:
        self._session = session
        self._notes = notes
        self.view = view
        self.epoch: float | None = None
        """Epoch, where a framework announces it."""
        self.planned: int | None = None
        """Length of the run in steps, where a framework announces it."""
        self.batch: Any = None
        """The batch that is trained on."""
        self.saves_announced = False
        """True while a framework announces its checkpoints itself."""
        self._saved: tuple[int, str] | None = None
        self.capturing: Callable[[], bool] | None = None
        """Whether a CUDA graph is being captured; None until it is known how to ask. Nothing is shown meanwhile: what we
        launch would become a part of the script's graph, and be replayed with it.
        """

    def learn_to_ask(self) -> None:
        """Find out how to ask whether a graph is captured. While CUDA is not in use it cannot be asked."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if not torch.version.cuda and not torch.version.hip:
            self.capturing = bool  # nothing to ask: no
        elif torch.cuda.is_initialized():
            self.capturing = torch._C._cuda_isCurrentStreamCapturing

    def show(
        self, kinds: Iterable[EventKind], step: int, facts: UpdateFacts, optimizer: Any, index: int, **more: Any
    ) -> None:
        """Those of these events that are wanted in this step, with all that is known of the update of an optimizer.

        :param more: further facts by their names in an event.
        """
        if self.capturing is not None and self.capturing():
            return
        session = self._session
        for kind in kinds:
            if kind not in session.wanted:
                continue
            session.emit(
                Event(
                    kind,
                    step,
                    epoch=self.epoch,
                    row=self._notes.row if self._notes.noting else None,
                    model=self.view,
                    # Gradients are complete before it is known who will use them.
                    optimizer=None if kind is EventKind.BACKWARD_END else optimizer,
                    optimizer_index=index,
                    grad_norm=facts.grad_norm,
                    max_norm=facts.max_norm,
                    clipped_scaled=facts.clipped_scaled,
                    clipped=facts.clipped,
                    loss_scale=facts.loss_scale,
                    kept_gradients=facts.kept_gradients,
                    batch=self.batch,
                    max_steps=session.stop.most_steps or self.planned,
                    **more,
                )
            )

    def emit(self, kind: EventKind, step: int, **facts: Any) -> None:
        """One event that says nothing of an update."""
        if self.capturing is not None and self.capturing():
            return
        session = self._session
        session.emit(
            Event(
                kind,
                step,
                epoch=self.epoch,
                row=self._notes.row if self._notes.noting else None,
                model=self.view,
                **facts,
            )
        )

    def train_start(self, step: int) -> None:
        """A training begins; a process may make several."""
        if self._session.wants(EventKind.TRAIN_START):
            event = Event(EventKind.TRAIN_START, step, epoch=self.epoch, model=self.view, max_steps=self.planned)
            self._session.emit(event)

    def batch_ready(self, step: int, batch: Any, dataset: Any, **more: Any) -> None:
        """A loader over ``dataset`` gave a batch. ``more``: as for :meth:`show`."""
        samples, tokens = batch_counts(batch)
        counts = {"n_samples": samples, "n_tokens": tokens, "dataset_size": length_of(dataset)}
        self.emit(EventKind.BATCH_READY, step, **counts, **more)

    def checkpoint_saved(self, step: int, path: str) -> None:
        """A file was written. The files of one step in one folder are one checkpoint."""
        place = (step, os.path.dirname(os.path.abspath(path)))
        if self.saves_announced or place == self._saved or not self._session.wants(EventKind.CHECKPOINT_SAVED):
            return
        self._saved = place
        self._session.emit(Event(EventKind.CHECKPOINT_SAVED, step, model=self.view, path=path))


# -- the loss ---------------------------------------------------------------------------

_DIVIDE_THEMSELVES = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Modules that divide micro-batch losses before ``backward``: what they pass is to be added up."""

_DIVISION = "DivBackward0"
_DEPTH = 60
_KEPT = 8


class LossMath:
    """Remembers what a ``GradScaler`` multiplied, so that no division has to be made (nor waited for)."""

    def __init__(self) -> None:
        self.scale: Any = None
        """Loss scale of the last ``scaler.scale`` call since the last loss, else None."""
        self.weight: float | None = None
        """How the loss of the last pass combines with others of its update: 1.0 (add up) where they have been divided
        already, else None.

        A framework on the call stack divides them; so does a loop that writes ``(loss / n).backward()`` and makes n
        backward passes an update. The last part of the first update is the first to show it, which is soon enough: parts
        are combined as the last one says.
        """
        self._scaled: list[tuple[weakref.ref[Any], Any, int | None]] = []
        self._known: tuple[float | None] | None = None
        """The weight as a framework has it; None before the first pass."""
        self._update = -1
        self._parts = 0
        self._parts_before = 0
        self._confirmed: int | None = None

    def weigh(self, weight: float) -> None:
        """A framework says how its micro-batch losses combine: each times ``weight``, and added up."""
        self._known = (weight,)

    def was_scaled(self, given: Any, result: Any, scale: Any) -> None:
        """``scaler.scale(given)`` returned ``result``. Lists are paired item by item."""
        self.scale = scale
        pairs = zip(given, result, strict=False) if isinstance(result, (list, tuple)) else [(given, result)]
        for before, after in pairs:
            if hasattr(after, "detach"):
                self._scaled.append((weakref.ref(after), before.detach(), _divisor_of(before)))
        del self._scaled[:-_KEPT]

    def of(self, tensors: Any, update: int) -> Any:
        """Detached scalar loss, or None if the tensors are no losses (a vector with a given gradient).

        :param update: number of the update that the backward pass is for.
        """
        if update != self._update:
            self._parts_before = self._parts if update == self._update + 1 else 0
            self._update, self._parts = update, 0
        self._parts += 1
        if self._known is None:
            self._known = (1.0 if _framework_calls() else None,)
        divisor: int | None = None
        losses = []
        listed = [tensors] if hasattr(tensors, "detach") else list(tensors) if isinstance(tensors, Iterable) else []
        for tensor in listed:
            if hasattr(tensor, "detach") and tensor.numel() == 1:
                if self._scaled:
                    loss, divisor = self._unscaled(tensor)
                else:
                    loss = tensor.detach()
                    if type(tensor.grad_fn).__name__ == _DIVISION:
                        divisor = _divisor_of(tensor)
                losses.append(loss)
        self._scaled.clear()
        self.weight = self._known[0]
        if self.weight is None and divisor is not None and len(listed) == 1:
            if divisor == self._parts:
                self._confirmed = divisor
            if divisor in (self._confirmed, self._parts_before):
                self.weight = 1.0
        if not losses or len(losses) != len(listed):
            return None
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])

    def _unscaled(self, tensor: Any) -> tuple[Any, int | None]:
        """The loss and its divisor, where some losses of this pass were scaled."""
        for ref, before, divisor in self._scaled:
            if ref() is tensor:
                return before, divisor
        loss = tensor.detach()
        if self.scale is not None:  # it was scaled, then changed again
            loss = loss / self.scale.to(loss.device, non_blocking=True)
        return loss, _divisor_of(tensor)


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


def _divisor_of(tensor: Any) -> int | None:
    """``n`` of a loss that is ``something / n`` with a whole n above 1; never waits for a device."""
    node: Any = getattr(tensor, "grad_fn", None)
    if type(node).__name__ != _DIVISION:
        return None
    try:
        if (
            getattr(node._raw_saved_other, "unpack_hook", None) is not None
        ):  # checkpointed or offloaded: reading has a price
            return None
        other = node._saved_other
    except (AttributeError, RuntimeError):
        return None
    if other is None or other.device.type != "cpu" or other.numel() != 1:
        return None
    n = float(other)
    return int(n) if n > 1 and n.is_integer() else None


def _framework_calls() -> bool:
    """Whether a framework that divides losses itself is on the call stack."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if str(frame.f_globals.get("__name__", "")).startswith(_DIVIDE_THEMSELVES):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def detached(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return value.detach() if hasattr(value, "detach") else value
