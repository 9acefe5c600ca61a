"""Notices scripts whose backward passes lead to no optimizer step."""

from __future__ import annotations

import weakref
from typing import Any

CYCLES = 3
"""Gradients made and thrown away without an attempt so often: nobody is going to step."""
MANY = 128
"""Backward passes without any attempt, where gradients are not seen to be thrown away. More than
any usual accumulation."""


class UnattemptedUpdates:
    """Tells long accumulation from a loop that never steps.

    A gradient that has become ``None`` by the next backward pass was thrown away by the script.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self.counts_backwards = False
        """True once backward passes have to serve as steps."""
        self._cycles = 0
        self._fresh = False
        self._witness: weakref.ref[Any] | None = None

    def backward_begins(self) -> None:
        self.backwards += 1
        if self._fresh and self._witness is not None:
            parameter = self._witness()
            if parameter is not None and parameter.grad is None:
                self._cycles += 1

    def backward_done(self, view: Any, optimizers: int) -> None:
        """:param optimizers: how many live; without any, the script updates by hand."""
        self._fresh = True
        witness = self._witness() if self._witness is not None else None
        if witness is None or witness.grad is None:
            held = next((p for _, p in view.named_parameters() if p.grad is not None), None)
            self._witness = weakref.ref(held) if held is not None else None
        if not optimizers or self._cycles >= CYCLES or self.backwards >= MANY:
            self.counts_backwards = True
