"""Gradients that nobody cleared, proved by torch's version counters: for loops that tell nothing before the backward pass.

A gradient that was cleared is another tensor afterwards (``set_to_none``), or was written once more than the backward
pass writes it. One that was not is the same tensor, written by the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event
from healthcheck.references import weak


@dataclass(slots=True)
class GradientMarks:
    """Which tensors one optimizer's gradients were after an update, and how often each had been written."""

    step: int
    optimizer: Callable[[], Any]
    marks: list[tuple[Callable[[], Any], Callable[[], Any], int]]

    @classmethod
    def after(cls, event: Event, params: Iterable[Any]) -> GradientMarks | None:
        """Note the gradients of ``params`` after the update of ``event``; None where versions prove nothing.

        A loss scale is taken out of the gradients in place, by some scalers and not by others.
        """
        import torch

        if event.loss_scale is not None:
            return None
        marks = [(weak(p), weak(p.grad), p.grad._version) for p in params if type(p.grad) is torch.Tensor]
        return cls(event.step, weak(event.optimizer), marks) if marks else None

    def held(self, event: Event) -> tuple[int, int] | None:
        """How many still hold the old gradient before the next update, of how many; None if that cannot be told.

        Counted are those written once since, or twice where the loop clips: with several micro-batches that
        finds nothing, and never what is not there.
        """
        if event.optimizer is not self.optimizer() or event.step != self.step + 1 or event.loss_scale is not None:
            return None
        writes = 1 if event.max_norm is None else 2
        held = 0
        for parameter, gradient, version in self.marks:
            now = getattr(parameter(), "grad", None)
            held += now is not None and now is gradient() and now._version - version == writes
        return held, len(self.marks)
