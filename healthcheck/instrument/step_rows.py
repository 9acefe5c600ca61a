"""A step as it is noted: one row of plain values for each update, its loss, and what a script logs in it.

What every step of a training has to say is written down here, while it happens, by whoever sees it: the step machine. The
probes read it later (:meth:`healthcheck.run.board.ProbeBoard.take_rows`). Events are built beside it for probes and
listeners that want them in this step.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from healthcheck.core.rows import StepRow, Update, UsedBatch
from healthcheck.core.runinfo import weak
from healthcheck.device.deferred import Deferred, DeviceScalar, Element, number
from healthcheck.instrument.data import batch_counts, length_of
from healthcheck.probes.batches import named_tensors

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_RATE = operator.methodcaller("get", "lr")
_FLOATS = {float}


@dataclass(slots=True)
class UpdateFacts:
    """What is known of the update at hand. A new one takes its place when the update is over.

    What a row has of it as well is set by :meth:`take`, so that it is noted there once.
    """

    taken: int = 0
    """How often something was taken."""
    grad_norm: Any = None
    """L2 norm of the gradients before clipping, where the loop has worked it out; a number or a 0-dim tensor."""
    max_norm: float | None = None
    clipped_scaled: bool | None = None
    """Whether gradients still carried the loss scale when they were clipped; None without clipping."""
    clipped: list[Any] | None = None
    """Parameters whose gradients were clipped; None where no clipping was seen."""
    loss_scale: Any = None
    backward_ended: bool = False
    """Whether ``backward_end`` was shown: gradients are complete."""
    closure_ran: bool = False
    """LBFGS evaluates its loss many times an update; the first evaluation is the update's."""

    kept_gradients: Any = None
    """While an update is shown: gradients that whoever looked first keeps for the others, and for the optimizer."""
    inner_gradients: Any = None
    """What was measured of gradients that optimizers used inside the backward pass."""

    optimizer: Any = None
    """The first optimizer that stepped, where a loop or a framework says later that its step is over."""
    index: int = 0
    skipped: bool | None = None

    def take(self, **facts: Any) -> None:
        """Something was said of the update: norm, threshold or loss scale, by the names here."""
        self.taken += 1
        for name, value in facts.items():
            setattr(self, name, value)

    def made(self, optimizer: Any, index: int, skipped: bool | None) -> None:
        """An optimizer has stepped. What a loop says of its step belongs to the first of several optimizers."""
        if self.optimizer is None:
            self.optimizer, self.index, self.skipped = optimizer, index, skipped


class StepNotes:
    """The rows of one training."""

    allowed = True
    """False: every step is shown by events alone."""

    def __init__(self, session: Session) -> None:
        self.on = False
        """True once an optimizer has stepped whose updates can be seen: the next step is noted. So are losses from now on,
        since those that are shown by events may turn out to be of that step."""
        self.row: StepRow | None = None
        """Of the update that is under way; None between two of them, and in a step that is not noted."""
        self.noting = False
        """Whether the step at hand is noted."""
        self._session = session
        self._batches: tuple[float, int, int] | None = None
        """Wait, samples and tokens of the batches since the last step's end."""
        self._used = UsedBatch(session.demand)
        self._last: Any = None
        """The batch of the step at hand that probes have looked at."""
        self._dataset: Callable[[], Any] = lambda: None
        """What batches are drawn from."""

    def open(self, step: int) -> StepRow:
        """A new row; one that is still open is finished."""
        if self.row is not None:
            self.close(step, self.row.optimizer_index)
        row = self.row = StepRow(step)
        return row

    def batch(self, batch: Any, waited: float | None, dataset: Any, *, begins_pass: bool) -> None:
        """A batch for the step at hand, or the next one."""
        samples, tokens = batch_counts(batch)
        if begins_pass or samples == 0:
            self._session.board.look_closely(loads=True)
        before = self._batches or (0.0, 0, 0)
        self._batches = (before[0] + (waited or 0.0), before[1] + (samples or 0), before[2] + (tokens or 0))
        if self._dataset() is not dataset:
            drawn_from = self._dataset = weak(dataset)
            self._used.rows = lambda: length_of(drawn_from())

    def batch_used(self, batch: Any) -> None:
        """A pass over this batch begins: show it to the probes that look at every one, once a step."""
        row = self.row
        board = self._session.board
        if batch is self._last or row is None or not board.batch_looks:
            return
        self._last, used = batch, self._used
        used.tensors = named_tensors(batch)
        for name, look in board.batch_looks:
            try:
                look(row, used)
            except (Exception, SystemExit) as error:
                board.failed(name, "look_at_batch", row.step, error)
        used.tensors = ()

    def loss(self, step: int, loss: Any, weight: float | None) -> bool:
        """A backward pass begins, or a loop tells its loss; False if the host knows that it is not finite.

        :param weight: as :attr:`healthcheck.core.events.Event.loss_weight`.
        """
        session, row = self._session, self.row
        now = session.last_event_at = session.clock.monotonic()
        if row is None:
            row = self.row = StepRow(step)
        elif row.attempted:
            row = self.open(step)
        active = session.active
        row.passes.append((now if active.paused_at is None else active.paused_at) - active.origin)
        if loss is None:
            return True
        if type(loss) is float:
            value: Any = loss
        elif getattr(loss, "is_cpu", False) and loss.is_floating_point():
            value = float(loss)  # as `number` does, at one call less in every pass; so does the next
        elif getattr(loss, "is_cuda", False) and loss.numel() == 1 and loss.is_floating_point():
            value = DeviceScalar(loss.detach() if loss.requires_grad else loss)
        else:
            value = number(loss)
            if value is None:
                return True
        if weight is not None and weight != 1.0:
            value = value * weight
        row.loss = value if row.loss is None else row.loss + value
        row.parts += 1
        row.averaged, row.breach = weight is None, None
        return type(value) is not float or value - value == 0.0

    def reported(self, step: int, index: int, loss: Any, weight: float | None) -> bool:
        """A loop tells the loss of the step that it ends, of which ``index`` was the first optimizer."""
        row = self.row
        if row is None or row.optimizer_index != index:
            row = self.open(step)
            row.optimizer_index = index
        attempted, row.attempted = row.attempted, False
        finite = self.loss(step, loss, weight)
        row.attempted = attempted
        return finite

    def complete(self, step: int, facts: UpdateFacts) -> StepRow:
        """The row of gradients that are complete and about to be clipped."""
        row = self.row
        if row is None or row.attempted:
            row = self.open(step)
        self._know(row, facts)
        return row

    def final(self, step: int, optimizer: Any, update: Update, facts: UpdateFacts) -> StepRow:
        """Gradients are final: note what the update is made with, and let those look at it who look at every one."""
        session, row = self._session, self.row
        if row is None or row.attempted:
            row = self.open(step)
        now = session.last_event_at = session.clock.monotonic()
        active, board, index = session.active, session.board, update.optimizer_index
        row.step, row.optimizer_index, row.attempted, row.seen = step, index, True, True
        row.update_time = (now if active.paused_at is None else active.paused_at) - active.origin
        if row.averaged and row.parts > 1:
            row.loss, row.averaged = row.loss / row.parts, False
        rates = row.rates = tuple(map(_RATE, optimizer.param_groups))
        if set(map(type, rates)) != _FLOATS:
            self._rates(row, rates)
        if row.facts != facts.taken:
            self._know(row, facts)
        board.open_row = row
        known = board.optimizers.get(index)
        if known is None or known() is not optimizer:
            board.meet(optimizer, index)
        row.optimizer = board.optimizers[index]
        update.optimizer, update.kept_gradients = optimizer, facts.kept_gradients
        if board.measures_device:
            self.look(row, update)
        else:
            for name, look in board.looks:  # as `look` does, at one call less in every step
                try:
                    look(row, update)
                except (Exception, SystemExit) as error:
                    board.failed(name, "look", step, error)
        update.optimizer = update.kept_gradients = None
        loss, norm = row.loss, row.norm
        row.alarming = (type(loss) is float and loss - loss != 0.0) or (type(norm) is float and norm - norm != 0.0)
        return row

    def look(self, row: StepRow, update: Update) -> None:
        """Show an update to the probes that look at every one."""
        board = self._session.board
        timed = board.device_time.begin() if board.measures_device and board.device_time is not None else None
        for name, look in board.looks:
            try:
                look(row, update)
            except (Exception, SystemExit) as error:
                board.failed(name, "look", row.step, error)
        if timed is not None:
            timed()

    def attempted(self, step: int, optimizer: Any, index: int, skipped: bool) -> None:
        """An update was made of which nothing was seen before, or skipped."""
        if not self.noting:  # events have said it all
            self.row = None
            return
        row = self.row
        if row is None or (row.attempted and row.optimizer_index != index):
            row = self.open(step)
        row.optimizer_index, row.attempted, row.skipped = index, True, skipped
        if not row.rates:
            row.optimizer = weak(optimizer)
            self._rates(row, tuple(map(_RATE, optimizer.param_groups)))

    @staticmethod
    def _rates(row: StepRow, rates: Sequence[Any]) -> None:
        row.rates = tuple(map(number, rates))
        row.late += [rate for rate in row.rates if isinstance(rate, Deferred)]

    def put_aside(self, step: int, index: int) -> StepRow | None:
        """The step ends before the row that is open, as another attempt of an optimizer shows; returns that row.

        What is left of it in the step are its backward passes.
        """
        coming, self.row = self.row, None
        if self.noting:
            row = self.row = StepRow(step, index, attempted=True)
            if coming is not None:
                row.passes, coming.passes = coming.passes, []
        return coming

    def _know(self, row: StepRow, facts: UpdateFacts) -> None:
        if facts.grad_norm is not None and row.grad_norm is None:
            row.grad_norm = number(facts.grad_norm)
            if isinstance(row.grad_norm, Deferred):
                row.late.append(row.grad_norm)
        if facts.loss_scale is not None:
            row.loss_scale = number(facts.loss_scale)
            if isinstance(row.loss_scale, Deferred):
                row.late.append(row.loss_scale)
        row.max_norm, row.clipped_scaled = facts.max_norm, facts.clipped_scaled
        row.facts = facts.taken

    @staticmethod
    def _hold(row: StepRow, held_back: Mapping[int, Any]) -> None:
        flags = row.held_back = {index: number(flag) for index, flag in held_back.items()}
        for flag in flags.values():
            if isinstance(flag, Deferred) and (type(flag) is not Element or flag.vector is not row.numbers):
                row.late.append(flag)

    def close(
        self,
        step: int,
        index: int,
        facts: UpdateFacts | None = None,
        held_back: Mapping[int, Any] | None = None,
        max_steps: int | None = None,
        reported: Mapping[str, Any] | None = None,
    ) -> None:
        """The update of the open row is over; with ``facts`` its step is, too.

        :param index: of the optimizer.
        :param held_back: as :attr:`healthcheck.core.events.Event.held_back`.
        :param reported: what else a loop or a framework says of the step, by the names in an event.
        """
        row, session = self.row, self._session
        if row is None or (row.attempted and row.optimizer_index != index):
            row = self.open(step)
            row.optimizer_index = index
        self.row = None
        if facts is not None:
            row.step, row.max_steps, row.ends = step, max_steps, True
            self._last = None
            collectives = session.facts.collectives
            if collectives is not None:
                ended = collectives.pass_ended_at
                forward, inside, delayed = collectives.step_over()
                row.collectives = forward, ended, inside, delayed
            if self._batches is not None:
                (row.data_wait, row.n_samples, row.n_tokens), self._batches = self._batches, None
            if reported:
                row.lr, row.skipped = reported.get("lr"), reported.get("skipped", row.skipped)
                if reported.get("n_samples") is not None:
                    row.n_samples = reported["n_samples"]
                if reported.get("n_tokens") is not None:
                    row.n_tokens = reported["n_tokens"]
            if row.facts != facts.taken:
                self._know(row, facts)
            if held_back:
                row.held_back = held_back
                for flag in held_back.values():
                    if type(flag) is not float:
                        self._hold(row, held_back)
                        break
        now = session.last_event_at = session.clock.monotonic()
        active, board = session.active, session.board
        row.time = board.noted_until = (now if active.paused_at is None else active.paused_at) - active.origin
        row.origin, row.over = active.origin, True
        if row.averaged and row.parts > 1:
            row.loss, row.averaged = row.loss / row.parts, False
        loss = row.loss
        with_others = type(loss) is DeviceScalar and loss.vector is not None and loss.vector is row.numbers
        if type(loss) is not float and isinstance(loss, Deferred) and not with_others:
            row.late.append(loss)
        if row.late:
            session.row_sent(row)
        board.open_row = None
        board.rows.append(row)


# --------------------------------------------------------------------------------------------------
# The loss of a step, from its backward passes.

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
                    if self._known[0] is None and type(tensor.grad_fn).__name__ == _DIVISION:
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


# --------------------------------------------------------------------------------------------------
# To which step a value belongs that a script logs: the one in which it is logged, whatever rules are on.
#
# Between two updates nothing that torch shows says where one turn of the loop ends and the next begins, and what is heard at
# all (batches, losses) depends on the rules. But code runs from top to bottom: what is logged behind the line that made the
# last update belongs to that update's step, what is logged before that line, or in another call of the function that has it,
# to the next.


Place = list[tuple[int, int, int]]
"""The functions that are running, innermost first: the frame and its code by their ids, and the instruction that it is at. Frames
themselves are not kept: they hold on to all local variables."""


class Counting(Protocol):
    """The step machine, as far as it is needed here."""

    session: Session
    number: int
    fresh: bool | None


LISTENED = 200
"""Steps after which nobody looks up any more where a script is that has logged nothing so far: that walks the whole stack at every
update. Should it begin to log later, its first value belongs to the last step; those after it to their own."""


class LoggedSteps:
    """Where in the script the last update was made, or attempted, and what is logged before or behind it.

    :param numbered: a framework numbers the steps: what is logged belongs to the one that it is in.
    """

    def __init__(self, machine: Counting, *, numbered: bool) -> None:
        self._machine = machine
        self.numbered = numbered
        self.place: Place = []
        """Where the last update was attempted, noted by whoever counts; empty where a framework says when its steps are over,
        and where nobody has looked."""
        self.step = 0
        """Of that update."""
        self.heard = False
        """Whether anything was logged so far."""
        machine.session.step_of_log = self.now

    def step_over(self, step: int) -> None:
        """A step is said to be over, by who has called us."""
        self.step = step
        looked_up = not self.numbered and (self.heard or step <= LISTENED)
        self.place = _place(sys._getframe(1)) if looked_up else []

    def left_out(self, step: int) -> None:
        """An update of a step that nobody watches. Of a script that has logged nothing so far nobody looks up where it is:
        should it begin to log in such a step, what it logs until the next update belongs to the last one."""
        self.step = step
        self.place = _place(sys._getframe(1)) if self.heard else []

    def now(self) -> int:
        """The step of a value that is logged now, from 1."""
        machine, last = self._machine, self.step
        self.heard = True
        if not self.place or self.numbered:
            return max(1, machine.number)
        if machine.number > last and machine.fresh:
            return last + 1  # the next step's pass has begun: of several that make one update, perhaps
        return last + 1 if _is_next_turn(self.place, _place(sys._getframe(1))) else max(1, last)


def _place(frame: FrameType | None) -> Place:
    place: Place = []
    while frame is not None:
        place.append((id(frame), id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return place


def _is_next_turn(update: Place, log: Place) -> bool:
    """Whether a loop has come round between the update and this call."""
    within = False
    for (frame, code, at), (other, its_code, its_at) in zip(reversed(update), reversed(log), strict=False):
        if (frame, code) != (other, its_code):
            return within  # called from one and the same instruction, twice; or another thread's, of which nothing is known
        if at != its_at:
            return its_at < at
        within = True
    return False
