"""Name the module in which a step stopped being finite, by making the step again."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.actions.locate.calls import Call, Calls
from healthcheck.actions.locate.forward import Frame, frame_of, origin
from healthcheck.actions.locate.ranges import bad, range_of
from healthcheck.actions.locate.replay import (
    CannotReplay,
    Deadline,
    OutOfTime,
    Replayed,
    nonfinite_weights,
    original,
    replay,
)
from healthcheck.actions.locate.words import (
    finite_words,
    input_words,
    loss_words,
    operation_words,
    origin_words,
    weight_words,
)
from healthcheck.protocols import ActionContext
from healthcheck.verdicts import ActionOutcome, Alert

if TYPE_CHECKING:
    from healthcheck.events import Event
    from healthcheck.session import Session

DEFAULT_SECONDS = 60.0
DEFAULT_KEEP = 64
MAX_RUNS = 3


class Locate:
    """Replay the step with hooks on every module: same arguments, same random numbers, same autocast.

    Names the first module whose output is not finite; if the forward pass stays finite, the operation
    whose gradient is not, and the module it stands in. Training state is left as it was. From the start
    of the run it keeps references to what the model was called with (opt-in for that reason); the replay
    itself costs a step and waits for the device, at most three times a run. It runs on the original module
    behind ``torch.compile`` and DDP; sharded models are not replayed.
    """

    name = "locate"
    stage = "observe"
    before_update = True
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "max_seconds": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": f"Give up after so long (default {DEFAULT_SECONDS:g}).",
            },
            "keep_mib": {
                "type": "integer",
                "minimum": 0,
                "description": "Most MiB of gradients of the model's output that are kept for the backward pass "
                f"(default {DEFAULT_KEEP}).",
            },
        },
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self.calls: Calls | None = None
        self._runs = 0

    # -- listening --------------------------------------------------------------------

    def listen(self, session: Session) -> None:
        """Keep the calls of the model from now on, if a rule of this session asks for it."""
        asked = [a.options for rule in session.rules.rules for a in rule.actions if a.name == self.name]
        if not asked:
            return
        keep = max(int(options.get("keep_mib", DEFAULT_KEEP)) for options in asked)
        calls = self.calls = Calls(keep * 2**20)
        calls.look()

        def look(event: Event) -> None:
            calls.look()

        def step_ends(event: Event) -> None:
            calls.step_ends(event.step)

        def over(event: Event) -> None:
            calls.close()

        for kind in ("train_start", "step_start", "batch_ready"):
            session.on(kind, look)
        for kind in ("before_update", "step_end"):
            session.on(kind, step_ends)
        session.on("train_end", over)

    def torch_is_there(self) -> None:
        """A watched script has imported torch: its first step can be seen too."""
        if self.calls is not None:
            self.calls.look()

    # -- acting -----------------------------------------------------------------------

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        if context.event is None or context.event.model is None:
            return ActionOutcome.nothing_done(self.name, "the training thread is not at a step")
        if self.calls is None:
            return ActionOutcome.nothing_done(self.name, "it did not listen from the start of this run")
        if self._runs >= MAX_RUNS:
            return ActionOutcome.nothing_done(self.name, f"this run has replayed {MAX_RUNS} steps already")
        step = alert.fired_step
        calls = self.calls.of(step)
        if not calls:
            return ActionOutcome.nothing_done(self.name, self._why_no_calls(step, context))
        self._runs += 1
        past = not context.before_update or step != context.step
        self.calls.paused = True
        try:
            return self._locate(step, calls, past, context, alert)
        finally:
            self.calls.paused = False

    def _why_no_calls(self, step: int, context: ActionContext) -> str:
        assert self.calls is not None
        if self.calls.error:
            return f"the calls of the model could not be kept ({self.calls.error})"
        if self.calls.kept and self.calls.kept[0].step > step:
            return f"the batch of step {step:,} is not kept any more at step {context.step:,}"
        return f"no call of a module was seen in step {step:,}: they stand inside a compiled region"

    def _locate(self, step: int, calls: list[Call], past: bool, context: ActionContext, alert: Alert) -> ActionOutcome:
        assert context.event is not None and context.event.model is not None
        names = {id(module): name for name, module in context.event.model.named_modules()}
        weights = {id(p): name for name, p in context.event.model.named_parameters()}
        deadline = Deadline(float(context.options.get("max_seconds", DEFAULT_SECONDS)))
        for root in {id(m): original(m) for call in calls if (m := call.module()) is not None}.values():
            spoiled = nonfinite_weights(root, weights)
            if spoiled:
                return ActionOutcome.nothing_done(self.name, weight_words(spoiled, step, past))
        try:
            seen = [replay(call, names, deadline.tick) for call in calls]
        except CannotReplay as error:
            return ActionOutcome.nothing_done(self.name, f"step {step:,} cannot be replayed: {error}")
        except OutOfTime:
            return ActionOutcome.nothing_done(self.name, "the replay took longer than max_seconds and was given up")
        path = _write_table(seen, context, alert)
        found = _judge(seen)
        if found is None:
            return ActionOutcome.of(self.name, finite_words(seen, step, past), found="nothing", path=path)
        late = f" (with the weights of step {context.step:,})" if past else ""
        return ActionOutcome.of(self.name, found.text + late, found=found.kind, module=found.module, path=path)


@dataclass(frozen=True, slots=True)
class _Finding:
    kind: str
    """``input``, ``output``, ``gradient`` or ``loss``."""
    module: str
    text: str


def _judge(seen: list[Replayed]) -> _Finding | None:
    """The first fault in the order in which a step computes: forward through all calls, then backward from the last."""
    for one in seen:
        if bad(one.top.inputs) is not None:
            return _Finding("input", one.top.name, input_words(one.top))
        where = origin(one.top)
        if where is not None:
            return _Finding("output", where.frame.name, origin_words(where))
    for one in reversed(seen):
        if one.arrived is not None:
            return _Finding("loss", one.top.name, loss_words(range_of(one.arrived)))
        if one.operation is not None:
            frame = frame_of(one.operation.number, one.top)
            return _Finding("gradient", frame.name, operation_words(one.operation, frame))
    return None


def _write_table(seen: list[Replayed], context: ActionContext, alert: Alert) -> str:
    """Every module call of the replay with its ranges, as CSV; its path, empty where no record is kept."""
    if context.run_dir is None:
        return ""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(("call", "module", "class", "what", "place", "shape", "dtype", "nonfinite", "nan", "min", "max"))
    for number, one in enumerate(seen, 1):
        for frame in one.top.walk():
            table.writerows(_rows(number, frame))
    path = context.run_dir / "locate" / f"{alert.number:03d}-rank{alert.rank}.csv"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(out.getvalue())
    except OSError as error:
        context.say(f"table of locate not written: {error.strerror or error} ({path})")
        return ""
    return str(path)


def _rows(number: int, frame: Frame) -> Iterator[tuple[Any, ...]]:
    for what, found in (("input", frame.inputs), ("output", frame.outputs)):
        for one in found:
            place = (number, frame.name, frame.kind, what, one.place, "x".join(map(str, one.shape)), one.dtype)
            low, high = ("" if end is None else f"{end:.6g}" for end in (one.low, one.high))
            yield (*place, one.bad, one.nan, low, high)
