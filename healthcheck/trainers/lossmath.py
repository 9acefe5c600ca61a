"""The loss in what a script gives to ``backward``: scales taken out, parts added, never read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

_DIVIDE_THEMSELVES = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.trainer")
"""Modules that divide micro-batch losses before ``backward``: what they pass is to be added up."""

_DEPTH = 60
_KEPT = 8


class LossMath:
    """Remembers what a ``GradScaler`` multiplied, so that no division has to be made (nor waited for)."""

    def __init__(self) -> None:
        self.scale: Any = None
        """Loss scale of the last ``scaler.scale`` call since the last loss, else None."""
        self._scaled: list[tuple[weakref.ref[Any], Any]] = []
        self._weight: tuple[float | None] | None = None

    def was_scaled(self, given: Any, result: Any, scale: Any) -> None:
        """``scaler.scale(given)`` returned ``result``. Lists are paired item by item."""
        self.scale = scale
        pairs = zip(given, result, strict=False) if isinstance(result, (list, tuple)) else [(given, result)]
        for before, after in pairs:
            if hasattr(after, "detach"):
                self._scaled.append((weakref.ref(after), before.detach()))
        del self._scaled[:-_KEPT]

    def of(self, tensors: Any) -> Any:
        """Detached scalar loss, or None if the tensors are no losses (a vector with a given gradient)."""
        listed = [tensors] if hasattr(tensors, "detach") else list(tensors) if isinstance(tensors, Iterable) else []
        losses = [self._unscaled(t) for t in listed if hasattr(t, "detach") and t.numel() == 1]
        self._scaled.clear()
        if not losses or len(losses) != len(listed):
            return None
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0])

    def _unscaled(self, tensor: Any) -> Any:
        for ref, before in self._scaled:
            if ref() is tensor:
                return before
        loss = tensor.detach()
        if self._scaled and self.scale is not None:  # it was scaled, then changed again
            return loss / self.scale.to(loss.device, non_blocking=True)
        return loss

    def weight(self) -> float | None:
        """How micro-batch losses combine: 1.0 where a framework on the call stack has divided them."""
        if self._weight is None:
            self._weight = (1.0 if _framework_calls() else None,)
        return self._weight[0]


def _framework_calls() -> bool:
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if str(frame.f_globals.get("__name__", "")).startswith(_DIVIDE_THEMSELVES):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
