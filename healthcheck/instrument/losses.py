"""The loss in what is given to ``backward``: scales taken out, parts added, never read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from healthcheck.device.tensors import on_host
from healthcheck.probes.graph import saved

_DIVIDE_THEMSELVES = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Modules that divide micro-batch losses before ``backward``: what they pass is to be added up."""

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
                loss, divisor = self._unscaled(tensor) if self._scaled else (tensor.detach(), _divisor_of(tensor))
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
    if type(node).__name__ != "DivBackward0":
        return None
    try:
        other = saved(node, "other")
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
