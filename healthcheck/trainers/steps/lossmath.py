"""The loss in what a script gives to ``backward``: scales taken out, parts added, never read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from healthcheck.probes.graph.walk import saved

_DIVIDE_THEMSELVES = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Modules that divide micro-batch losses before ``backward``: what they pass is to be added up."""

_DEPTH = 60
_KEPT = 8


class LossMath:
    """Remembers what a ``GradScaler`` multiplied, so that no division has to be made (nor waited for)."""

    def __init__(self) -> None:
        self.scale: Any = None
        """Loss scale of the last ``scaler.scale`` call since the last loss, else None."""
        self._scaled: list[tuple[weakref.ref[Any], Any, int | None]] = []
        self._weight: tuple[float | None] | None = None
        self._divisor: int | None = None
        self._parts = 0
        self._parts_before = 0
        self._confirmed: int | None = None

    def was_scaled(self, given: Any, result: Any, scale: Any) -> None:
        """``scaler.scale(given)`` returned ``result``. Lists are paired item by item."""
        self.scale = scale
        pairs = zip(given, result, strict=False) if isinstance(result, (list, tuple)) else [(given, result)]
        for before, after in pairs:
            if hasattr(after, "detach"):
                self._scaled.append((weakref.ref(after), before.detach(), _divisor_of(before)))
        del self._scaled[:-_KEPT]

    def step_begins(self) -> None:
        """The backward passes that follow belong to the next step."""
        self._parts_before, self._parts = self._parts, 0

    def of(self, tensors: Any) -> Any:
        """Detached scalar loss, or None if the tensors are no losses (a vector with a given gradient)."""
        listed = [tensors] if hasattr(tensors, "detach") else list(tensors) if isinstance(tensors, Iterable) else []
        self._parts += 1
        self._divisor = None
        losses = []
        for tensor in listed:
            if hasattr(tensor, "detach") and tensor.numel() == 1:
                loss, divisor = self._unscaled(tensor) if self._scaled else (tensor.detach(), _divisor_of(tensor))
                losses.append(loss)
                if len(listed) == 1:
                    self._divisor = divisor
        self._scaled.clear()
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

    def weight(self) -> float | None:
        """How micro-batch losses combine: 1.0 (add up) where they have been divided already, else None.

        A framework on the call stack divides them; so does a loop that writes ``(loss / n).backward()``
        and makes n backward passes a step. The last part of the first step is the first to show it,
        which is soon enough: parts are combined as the last one says.
        """
        if self._weight is None:
            self._weight = (1.0 if _framework_calls() else None,)
        if self._weight[0] is not None:
            return self._weight[0]
        n = self._divisor
        if n is None:
            return None
        if n == self._parts:
            self._confirmed = n
        return 1.0 if n in (self._confirmed, self._parts_before) else None


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
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if str(frame.f_globals.get("__name__", "")).startswith(_DIVIDE_THEMSELVES):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
