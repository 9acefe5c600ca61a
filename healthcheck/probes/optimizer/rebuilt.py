"""Optimizers that are made anew for each update and never have a state to go by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Metric, Sample

LOOK_EVERY = 50
"""Steps between two looks at an optimizer that has made a second update."""


class RebuiltOptimizerProbe:
    """Counts optimizers in a row that took over the same parameters and made one update each.

    Adam without its moments is the sign of the gradient, and momentum that begins anew is none. Plain SGD has nothing
    to lose and is not counted, nor are optimizers of copies (inner loops of meta learning).
    """

    name = "rebuilt-optimizer"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.rebuilt",
            "Optimizers in a row, of the same parameters and with a state to lose, that made one update each.",
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._first: Callable[[], Any] = lambda: None
        """The first parameter of the optimizer before."""
        self._row = 0
        self._step = 0
        """Of the update before that was seen."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if optimizer is None or event.optimizer_index > 0:
            return ()
        follows, self._step = self._step == event.step - 1, event.step
        if self._optimizer() is optimizer:
            self._row = 0
            self.rests_until = event.step + LOOK_EVERY
            return (Sample("optimizer.rebuilt", event.step, 0.0),)
        first = optimizer.param_groups[0]["params"][0] if optimizer.param_groups[0]["params"] else None
        same = follows and first is not None and self._first() is first
        self._row = self._row + 1 if same and has_memory(optimizer) and not optimizer.state else 0
        self._optimizer, self._first = weak(optimizer), weak(first)
        return (Sample("optimizer.rebuilt", event.step, float(self._row)),)


def has_memory(optimizer: Any) -> bool:
    """Whether its updates depend on the gradients before: momentum, or averages of gradients."""
    known = optimizer.defaults
    return (
        "betas" in known or "beta2_decay" in known or "rho" in known or "alpha" in known or bool(known.get("momentum"))
    )
