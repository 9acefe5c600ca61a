"""Gradients taken away from an optimizer for one step."""

from __future__ import annotations

from typing import Any

from healthcheck.trainers.modelview import parameters_of


class WithheldGradients:
    """The gradients of an optimizer, until its step is over."""

    __slots__ = ("_taken",)

    def __init__(self, taken: list[tuple[Any, Any]]) -> None:
        self._taken = taken

    @classmethod
    def of(cls, optimizer: Any) -> WithheldGradients | None:
        """Take them away: without any, an optimizer leaves weights, moments and counters alone. None if it has none."""
        taken = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for parameter, _ in taken:
            parameter.grad = None
        return cls(taken) if taken else None

    def give_back(self) -> None:
        """Put them back after the step, for scripts that look at them."""
        for parameter, gradient in self._taken:
            parameter.grad = gradient
