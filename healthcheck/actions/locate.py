"""Name the module in which a step stopped being finite, by making the step again, and say it in one sentence."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.actions.locate_calls import Call, Calls, Range, bad, range_of, widest
from healthcheck.actions.locate_replay import (
    BadOperation,
    CannotReplay,
    Deadline,
    Frame,
    Origin,
    OutOfTime,
    Replayed,
    frame_of,
    nonfinite_weights,
    origin,
    original,
    replay,
)
from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.protocols import ActionContext
from healthcheck.core.text import power

if TYPE_CHECKING:
    from healthcheck.core.events import Event
    from healthcheck.run.session import Session


def origin_words(found: Origin) -> str:
    """``first non-finite output: `layers.3.attn.softmax` (Softmax), ...; inputs finite, max 6.5e+04 in float16``."""
    frame = found.frame
    whose = ""
    if found.before is not None:
        wrong = bad(found.before.inputs)
        assert wrong is not None
        place = f"in {_own_code(frame)} before {_called(found.before)}, whose input has {wrong.counts()}"
        whose = f" of {_called(frame)}"
    else:
        wrong = bad(frame.outputs)
        assert wrong is not None
        place = f"{_called(frame)}, {wrong.counts()}"
        if frame.inner:
            last = f" after {_called(found.after)}" if found.after is not None else ""
            place = f"in {_own_code(frame)}{last}, {wrong.counts()}"
            whose = f" of {_called(frame)}"
    text = f"first non-finite output: {place}; inputs{whose} finite{_most(frame.inputs)}"
    if found.after is not None:
        text += f"; before it {_called(found.after)} gave{_most(found.after.outputs, lone=True)}"
    return text


def input_words(top: Frame) -> str:
    wrong = bad(top.inputs)
    assert wrong is not None
    return f"the input itself is not finite: {_argument(wrong.place)} of {_called(top)} has {wrong.counts()}"


def loss_words(arrived: Range) -> str:
    return (
        f"the model is finite; the gradient that came back to its output is not ({arrived.counts()}): the fault is after "
        "the model, where the loss is computed"
    )


def operation_words(operation: BadOperation, frame: Frame) -> str:
    made = bad(operation.made)
    assert made is not None
    return (
        f"forward finite; first non-finite gradient: in the backward of {operation.name} in {_called(frame)}, "
        f"{made.counts()}; the gradient that reached it is finite{_most(operation.reached)}"
        f"; inputs of {_called(frame)} were finite{_most(frame.inputs)}"
    )


def weight_words(found: Sequence[tuple[str, int, int]], step: int, past: bool) -> str:
    name, count, of = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    if past:
        return (
            f"the update of step {step:,} is past and has written it into the weights (`{name}`, {count:,} of {of:,} "
            f"values{more}), so a replay would only show those; let the rule also skip_update"
        )
    return (
        f"the weights were not finite before step {step:,} (`{name}`, {count:,} of {of:,} values{more}): an earlier "
        "update wrote them, or the checkpoint holds them"
    )


def finite_words(seen: Sequence[Replayed], step: int, past: bool) -> str:
    """Nothing was found: how far it looked."""
    frames = [(one, frame) for call in seen for frame in call.top.walk() if (one := widest(frame.outputs)) is not None]
    one, frame = max(frames, key=lambda pair: pair[0].absmax or 0.0, default=(None, None))
    largest = f" (largest output: {_called(frame)}{_most([one])})" if one and frame else ""
    if not all(call.came_again for call in seen):
        again = "chance outside the known generators, state outside the modules, or weights changed since"
        return (
            f"the replay of step {step:,} is finite, while the output of the model was not in the step{largest}: it does "
            f"not come again ({again})"
        )
    blind = next((call.backward for call in seen if call.backward), "")
    again = "forward finite" if blind else "forward and backward finite"
    text = f"the replay of step {step:,} is {again}{largest}"
    if blind:
        text += f"; backward not replayed: {blind}"
    if past:
        text += "; it ran with the weights after the update"
    return f"{text}; the fault is after the model, or does not happen again"


def _called(frame: Frame) -> str:
    return f"`{frame.name}` ({frame.kind})" if frame.name else f"the model ({frame.kind})"


def _own_code(frame: Frame) -> str:
    return f"the code of {_called(frame)}"


def _argument(place: str) -> str:
    """``[0][1]`` -> ``argument 2``, ``[1].x`` -> ``argument `x```: as hooks are given positions and keywords."""
    if place.startswith("[0]["):
        number, _, rest = place[4:].partition("]")
        return f"argument {int(number) + 1}" + (f" (`{rest.lstrip('.')}`)" if rest else "")
    return f"argument `{place.removeprefix('[1].')}`"


def _most(found: Sequence[Range], *, lone: bool = False) -> str:
    one = widest(list(found))
    if one is None or one.absmax is None:
        return " no floating point values" if lone else ""
    return f"{' ' if lone else ', '}max {power(one.absmax)} in {one.dtype}"


# --------------------------------------------------------------------------------------------------
# Name the module in which a step stopped being finite, by making the step again.


DEFAULT_SECONDS = 60.0
DEFAULT_KEEP = 64
MAX_RUNS = 3


class Locate:
    """Replay the step with hooks on every module: same arguments, same random numbers, same autocast.

    Names the first module whose output is not finite; if the forward pass stays finite, the operation
    whose gradient is not, and the module that contains it. Training state is left as it was. From the start
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
        asked = [a.options for rule in session.rules.causes for a in rule.actions if a.name == self.name]
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
            return ActionOutcome.nothing_done(self.name, "it was not active from the start of this run")
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
            return f"the batch of step {step:,} is no longer kept at step {context.step:,}"
        return f"no call of a module was seen in step {step:,}: they are inside a compiled region"

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
