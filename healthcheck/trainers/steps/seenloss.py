"""The loss of a loop that tells it only after the update: what its backward passes started from.

Only for holding an update back. What a rule judges and a report shows is what the loop tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.probes.values import scalar
from healthcheck.trainers.steps.lossmath import LossMath


class SeenLoss:
    """Losses of the backward passes since the last update that reached the watched optimizers.

    :param math: takes loss scales and divisors out, as for a script.
    """

    def __init__(self, math: LossMath) -> None:
        self._math = math
        self._now: Any = None
        self._weight: float | None = None
        self._marks: list[tuple[Any, int]] = []
        self._sum: Any = None
        self._parts = 0

    def begins(self, tensors: Any, optimizers: Iterable[Any]) -> None:
        """A backward pass from ``tensors`` is about to run."""
        self._now = scalar(self._math.of(tensors))
        self._weight = self._math.weight()
        self._marks = _marks(optimizers)

    def ended(self, optimizers: Iterable[Any]) -> None:
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
        self._math.step_begins()
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
