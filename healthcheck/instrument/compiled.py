"""Keeping out of what ``torch.compile`` compiles: a region is traced as if nobody watched.

Nothing here is used until something is compiled in the process: :func:`when_something_is_compiled` is the one switch.
Until then we hear of a training through plain functions and torch's public hooks alone.

Dynamo follows every call that a region makes, ours too. Marked as not to be traced they would end a graph each, and
fail a region compiled with ``fullgraph=True``; traced, they would become a part of it. So each has two faces. In a
trace it is the function that it stands for, and leaves a note of what only the region knows. Run as Python, between
two graphs or without any, it is our code, and Dynamo is kept from looking into that: by setting its frame callback
aside, and by giving the ``step`` of torch's optimizers a code object of its own that Dynamo leaves alone.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.step_rows import UpdateFacts

Function = Callable[..., Any]


def when_something_is_compiled(function: Callable[[], None], patches: Patches, imports: AfterImport) -> None:
    """Call ``function`` once: now, if this process compiles with Dynamo already, else just before it first does.

    May be called before torch is imported.
    """
    waiting = [function]

    def compiling() -> None:
        while waiting:
            waiting.pop()()

    def look(dynamo: ModuleType) -> None:
        if _has_compiled(dynamo):
            compiling()
            return

        def make(original: Function) -> Function:
            def optimize(*args: Any, **kwargs: Any) -> Any:
                compiling()
                return original(*args, **kwargs)

            return optimize

        # What torch.compile and Module.compile come to, under whatever name a script has imported them.
        patches.replace(dynamo, "optimize", make)

    imports.when("torch._dynamo", look)


def something_is_compiled() -> bool:
    """Whether this process has compiled with Dynamo by now."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and _has_compiled(dynamo)


def _has_compiled(dynamo: ModuleType) -> bool:
    # Every context of Dynamo leaves its backend here, those that only keep it out leave None or False.
    backends = getattr(dynamo.eval_frame, "cached_backends", None)
    return backends is None or any(backend not in (None, False) for backend in backends.values())


class RegionNotes:
    """What compiled regions did to an optimizer unseen. Set in a trace; Dynamo sets it again after each run.

    Only plain stores are made there: what a trace reads, Dynamo guards, and compiles again when it has changed.
    """

    stepped: Any = None
    """An optimizer whose step is a part of a graph."""
    made_updates: bool = False
    """Whether there was such a step: it is seen only after it was made."""
    clipped: bool = False
    total_norm: Any = None
    """0-dim tensor: norm before clipping, of the kind that the loop asked for."""
    max_norm: float | None = None
    by_l2: bool = False
    """Whether that norm is the L2 norm."""

    def norm_taken(self, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> None:
        """``get_total_norm`` was called."""
        self.by_l2 = float(norm_type) == 2.0

    def norm_clipped(self, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        """``clip_grads_with_norm_`` was called."""
        self.clipped, self.max_norm, self.total_norm = True, max_norm, total_norm

    def values_clipped(self, *args: Any, **kwargs: Any) -> None:
        """``clip_grad_value_`` was called."""
        self.clipped, self.max_norm, self.total_norm = True, None, None

    def take_clipping(self, facts: UpdateFacts) -> bool:
        """Put what was noted of clipping among the facts of its update. False if it hides what the gradients were."""
        if not self.clipped:
            return True
        norm, limit, known = self.total_norm, self.max_norm, self.by_l2 and self.total_norm is not None
        self.forget()
        facts.backward_ended = True
        if known:
            facts.take(grad_norm=norm.detach(), max_norm=None if hasattr(limit, "detach") else limit)
        return known

    def forget(self) -> None:
        self.clipped = self.by_l2 = False
        self.stepped = self.total_norm = self.max_norm = None


class _Kept(threading.local):
    callback: Any = None
    """Dynamo's callback of the frame that called us, while our code runs without it."""
    until_step_ends: Any = None


_kept = _Kept()


@functools.cache
def _frame_switch() -> Function | None:
    """Sets Dynamo's callback of this thread and returns the one before. It is torch's own affair: None where it is
    not there or works in another way; then a graph ends where our code is called, and all else is as ever."""
    try:
        from torch._C._dynamo import eval_frame
        from torch.compiler import is_dynamo_compiling

        switch: Function = eval_frame.set_eval_frame
        switch(switch(None))
        is_dynamo_compiling()
        _run_as_python(_frame_switch.__wrapped__.__code__)
    except Exception:
        return None
    return switch


def two_faced(original: Function, make: Callable[[Function], Function], note: Function | None = None) -> Function:
    """A replacement of ``original``: ``make(original)`` when run as Python, ``original`` itself in a trace.

    :param note: called in the trace with the same arguments. May only store into a :class:`RegionNotes`.
    """
    set_eval_frame = _frame_switch()
    if set_eval_frame is None:
        return make(original)
    from torch.compiler import is_dynamo_compiling

    def reopened(*args: Any, **kwargs: Any) -> Any:
        callback = _kept.callback
        if callback is None:
            return original(*args, **kwargs)
        _kept.callback = None
        set_eval_frame(callback)
        try:
            return original(*args, **kwargs)
        finally:
            set_eval_frame(None)
            _kept.callback = callback

    ours = make(reopened)

    def outer(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            if note is not None:
                note(*args, **kwargs)
            return original(*args, **kwargs)
        callback = set_eval_frame(None)
        if callback is None:
            return ours(*args, **kwargs)
        before, _kept.callback = _kept.callback, callback
        try:
            return ours(*args, **kwargs)
        finally:
            _kept.callback = before
            set_eval_frame(callback)

    _run_as_python(outer.__code__)
    return outer


def step_hooks(before: Function, after: Function, withheld: Callable[[], bool], notes: RegionNotes) -> list[Function]:
    """Hooks for before and after an optimizer's step, with the signature of torch's.

    :param withheld: whether ``before`` took the gradients away: the step that has nothing to do then runs as
        Python. For the compiled one that would be a new case, and it would be compiled again.
    """
    set_eval_frame = _frame_switch()
    if set_eval_frame is None:
        import torch

        return [torch.compiler.disable(hook) for hook in (before, after)]
    from torch.compiler import is_dynamo_compiling

    def begins(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            notes.stepped = optimizer
            return None
        notes.stepped = _kept.until_step_ends = None
        callback = set_eval_frame(None)
        if callback is None:
            return before(optimizer, args, kwargs)
        try:
            return before(optimizer, args, kwargs)
        finally:
            if withheld():
                _kept.until_step_ends = callback
            else:
                set_eval_frame(callback)

    def ends(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        callback = set_eval_frame(None)
        if callback is None:
            callback, _kept.until_step_ends = _kept.until_step_ends, None
        try:
            after(optimizer, args, kwargs)
        finally:
            if callback is not None:
                set_eval_frame(callback)

    hooks: list[Function] = [begins, ends]
    for hook in hooks:
        _run_as_python(hook.__code__)
    return hooks


def step_seen(optimizer: Any) -> Callable[[], None] | None:
    """Have the step of this optimizer's class call its hooks as Python, where its graphs end anyway.

    Torch's own optimizers end the graph before and after their arithmetic. Between those ends and the hooks there
    is nothing to compile, so the function that calls the hooks is left to Python. The arithmetic is compiled
    as before. Returns what undoes it; None where the step can be a part of a larger graph, or it is done already.
    """
    step: Any = getattr(type(optimizer), "step", None)
    if _frame_switch() is None or not getattr(step, "hooked", False) or not _ends_graphs(step):
        return None
    shared: CodeType = step.__code__  # with the steps of all other classes
    if getattr(step, _OWN_CODE, None) is shared:
        return None
    own = shared.replace()
    step.__code__ = own
    setattr(step, _OWN_CODE, own)
    _run_as_python(own)

    def undo() -> None:
        if step.__code__ is own:
            step.__code__ = shared
        delattr(step, _OWN_CODE)

    return undo


_OWN_CODE = "_healthcheck_code"


def _ends_graphs(function: Any) -> bool:
    """Whether a function, or one that it wraps, breaks every graph that it would be a part of."""
    while function is not None:
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        if "graph_break" in names or getattr(function, "_torchdynamo_disable", False):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _run_as_python(code: CodeType) -> None:
    """Dynamo leaves frames of this code alone where they are called as Python; what they call is its own matter.

    In a trace of their caller they are followed like any others.
    """
    from torch._C._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:  # torch 2.6
        skip(code)
    elif hasattr(eval_frame, "set_code_exec_strategy"):
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
