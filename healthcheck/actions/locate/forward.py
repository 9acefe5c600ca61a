"""The forward pass of a replayed call as a tree of module calls, and where in it values stop being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.actions.locate.ranges import Range, bad, ranges


@dataclass(slots=True, eq=False)
class Frame:
    """One call of one module."""

    name: str
    """Canonical name; empty for the outermost module."""
    kind: str
    """Its class."""
    depth: int
    inputs: list[Range]
    outputs: list[Range] = field(default_factory=list)
    inner: list[Frame] = field(default_factory=list)
    first_op: int = 0
    last_op: int = 0
    """Numbers that autograd gave to the operations inside: from ``first_op``, up to before ``last_op``."""

    def walk(self) -> Iterator[Frame]:
        yield self
        for frame in self.inner:
            yield from frame.walk()


@dataclass(slots=True)
class Origin:
    """Where values stopped being finite. The fault is the module's own, or in its code beside the modules it calls."""

    frame: Frame
    after: Frame | None = None
    """The module call before, whose output is finite."""
    before: Frame | None = None
    """In the module's own code ahead of this call, whose input is not finite."""

    @property
    def whole(self) -> bool:
        """Whether the module as such is meant: nothing smaller was seen inside it."""
        return not self.frame.inner


class ForwardTrace:
    """Hooks on every module of ``root`` while it is replayed. Reads every output, so it waits for the device.

    :param names: module id -> canonical name.
    :param tick: called at every module; raises when time is up.
    """

    def __init__(self, root: Any, names: Mapping[int, str], tick: Callable[[], None]) -> None:
        self.root = root
        self.names = names
        self.tick = tick
        self.top: Frame | None = None
        self.over = False
        """True once the backward pass runs: activation checkpointing calls modules again there."""
        self._open: list[Frame] = []
        self._handles: list[Any] = []

    def __enter__(self) -> ForwardTrace:
        for name, module in self.root.named_modules():
            try:
                began = module.register_forward_pre_hook(
                    self._began(self.names.get(id(module), name)), with_kwargs=True
                )
                self._handles += [began, module.register_forward_hook(self._ended)]
            except RuntimeError:  # a scripted part takes no hooks: it shows as code of the module around it
                continue
        return self

    def __exit__(self, *_: Any) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _began(self, name: str) -> Callable[..., None]:
        def began(module: Any, arguments: Any, keywords: Any) -> None:
            if self.over:
                return
            self.tick()
            frame = Frame(name, type(module).__name__, len(self._open), ranges((arguments, keywords)))
            frame.first_op = _next_op()
            if self._open:
                self._open[-1].inner.append(frame)
            elif self.top is None:
                self.top = frame
            self._open.append(frame)

        return began

    def _ended(self, module: Any, arguments: Any, output: Any) -> None:
        if self.over or not self._open:
            return
        frame = self._open.pop()
        frame.last_op = _next_op()
        frame.outputs = ranges(output)


def _next_op() -> int:
    import torch

    return int(torch._C._autograd._get_sequence_nr())


def origin(frame: Frame) -> Origin | None:
    """The first place from which non-finite values reached the output of ``frame``; None if that is finite.

    What a later module made finite again does not count: masks of minus infinity are taken in by a softmax.
    """
    if bad(frame.outputs) is None:
        return None
    suspect: Origin | None = None
    last: Frame | None = None
    for inner in frame.inner:
        taken_in = bad(inner.inputs) is not None
        if bad(inner.outputs) is None:
            if taken_in:
                suspect = None
        elif suspect is None:
            suspect = Origin(frame, after=last, before=inner) if taken_in else _inside(inner, last)
        last = inner
    return suspect or Origin(frame, after=last)


def _inside(inner: Frame, last: Frame | None) -> Origin:
    found = origin(inner)
    assert found is not None, "its output is not finite"
    if found.after is None and found.before is None:
        found.after = last
    return found


def frame_of(op: int, top: Frame) -> Frame:
    """The innermost module call during which autograd recorded this operation."""
    inside = [frame for frame in top.walk() if frame.first_op <= op < frame.last_op]
    return max(inside, key=lambda frame: frame.depth, default=top)
