"""What ``locate`` found, as one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from healthcheck.actions.locate.backward import BadOperation
from healthcheck.actions.locate.forward import Frame, Origin
from healthcheck.actions.locate.ranges import Range, bad, short, widest
from healthcheck.actions.locate.replay import Replayed


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
    return f"{text}; the fault is after the model, or does not come again"


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
    return f"{' ' if lone else ', '}max {short(one.absmax)} in {one.dtype}"
