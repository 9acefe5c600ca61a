"""The boundary to foreign code: what plugins raise ends here, with its owner and its hook, and never in a training.

Every call of a plugin's code is guarded: loading and registration in :mod:`healthcheck.extend.host`, hooks and reports
in :mod:`healthcheck.extend.dispatch`, conditions here, probes, actions and readers where they are called. Each guard
catches ``BaseException`` and asks :func:`passes_on`, so that what a plugin can raise is decided in one place.
"""

from __future__ import annotations

import opcode
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from healthcheck.core.errors import StopTraining
from healthcheck.core.redact import redact_text

F = TypeVar("F", bound=Callable[..., Any])

LONGEST = 2000
"""Characters of what an error says that are kept."""
_RAISING = ("RAISE_VARARGS", "RERAISE")


def describe(error: BaseException) -> str:
    """``RuntimeError: boom``, without secrets. Never raises: the text of an exception is foreign code too."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as again:
        if passes_on(again):
            raise
        return f"{name} (whose own text cannot be had: {type(again).__name__})"
    return f"{name}: {redact_text(text[:LONGEST])}" if text else name


def place_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame, which is the plugin's own."""
    if isinstance(error.__cause__, StopIteration):  # inside a generator; Python makes a RuntimeError of it outside
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def passes_on(error: BaseException) -> bool:
    """Whether an error that came out of foreign code is not that code's: our own stop, Ctrl-C, a signal handler's."""
    if isinstance(error, StopTraining):
        return True
    return is_ctrl_c(error) or from_signal_handler(error)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether a ``KeyboardInterrupt`` came from the keyboard: then no ``raise`` stands where it came up."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    innermost = _innermost(error)
    if innermost is None:
        return True
    code = innermost.tb_frame.f_code.co_code
    return opcode.opname[code[innermost.tb_lasti]] not in _RAISING


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised this while we happened to run: then it is not ours to keep.

    A script's handler may end it (``sys.exit``) or interrupt it (a time limit) at any instruction.
    """
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


# --------------------------------------------------------------------------- code that does not come back


_CALLS: dict[CodeType, Callable[[dict[str, Any]], tuple[str, str]]] = {}


def calls_foreign(names: Callable[[dict[str, Any]], tuple[str, str]]) -> Callable[[F], F]:
    """Mark a function that calls plugins, so that :func:`running_in` can say whose code runs.

    Looking at its frame costs the calls themselves nothing.

    :param names: takes the local variables of the function; returns owner and hook.
    """

    def mark(function: F) -> F:
        _CALLS[function.__code__] = names
        return function

    return mark


def running_in(frame: FrameType | None) -> tuple[str, str, list[str]] | None:
    """Whose code a thread is in: ``(owner, hook, stack)``, innermost call first; None if it is in nobody's.

    :param frame: the innermost frame of the thread.
    """
    stack: list[str] = []
    while frame is not None:
        names = _CALLS.get(frame.f_code)
        if names is not None:
            try:
                owner, hook = names(frame.f_locals)
            except (KeyError, AttributeError):  # between two of its calls
                return None
            return (owner, hook, stack) if stack else None
        stack.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return None


# --------------------------------------------------------------------------- conditions of plugins


@dataclass(frozen=True, slots=True)
class BrokenCondition:
    """A condition of a plugin that raised; its rule judges nothing more."""

    owner: str
    condition: str
    rule: str
    error: BaseException

    def reason(self) -> str:
        """Why the rule is not judged, for the report."""
        return f"its condition {self.condition} raised {describe(self.error)} ({place_of(self.error)})"


broken: list[BrokenCondition] = []
"""Conditions that raised and of which nobody has heard yet. Scorers are made deep inside the engine, which knows neither
sessions nor reports: whoever has had rules judged takes what stands here, in the same thread."""


def take_broken() -> list[BrokenCondition]:
    """What :data:`broken` holds, which is empty afterwards."""
    taken = list(broken)
    del broken[: len(taken)]
    return taken


class GuardedCondition:
    """A compiled condition of a plugin, whose scorers are guarded. All else is the condition's own."""

    def __init__(self, condition: Any, owner: str, rule: str) -> None:
        self._condition = condition
        self._owner = owner
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copies ask before there is a condition
            raise AttributeError(name)
        return getattr(self._condition, name)

    def start(self, *parts: Any) -> Any:
        try:
            return GuardedScorer(self._condition.start(*parts), self.failed)
        except BaseException as error:
            self.failed(error)
            return GuardedScorer(None, self.failed)

    def failed(self, error: BaseException) -> None:
        """Raises the error again if it passes on."""
        if passes_on(error):
            raise error
        broken.append(BrokenCondition(self._owner, str(self._condition.name), self._rule, error))


class GuardedScorer:
    """A scorer of a plugin. After its first error it scores nothing and publishes no bound.

    :param scorer: None for one that could not even be made.
    """

    def __init__(self, scorer: Any, failed: Callable[[BaseException], None]) -> None:
        self._scorer = scorer
        self._failed = failed

    def _ask(self, otherwise: Any, name: str, *given: Any, call: bool = True) -> Any:
        if self._scorer is None:
            return otherwise
        try:
            found = getattr(self._scorer, name)
            return found(*given) if call else found
        except BaseException as error:
            self._scorer = None
            self._failed(error)
            return otherwise

    @property
    def normal(self) -> Any:
        return self._ask(None, "normal", call=False)

    @property
    def memoryless(self) -> bool:
        return bool(self._ask(False, "memoryless", call=False))

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Any) -> Any:
        return self._ask([(None, None)] * len(values), "update", values, steps, quiet)

    def bound(self, healthy: Any) -> Any:
        return self._ask(None, "bound", healthy)

    def state(self) -> Any:
        return self._ask(None, "state")

    def restore(self, state: Any) -> None:
        """Raises what the scorer raises: its rule starts fresh then, as with any state that cannot be read."""
        if self._scorer is not None:
            self._scorer.restore(state)

    def __getattr__(self, name: str) -> Any:
        # `learn`, `join` and what an absence scorer has besides: offered only where the scorer offers it.
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._scorer, name)
        if not callable(found):
            return found
        return lambda *given: self._ask(None, name, *given)
