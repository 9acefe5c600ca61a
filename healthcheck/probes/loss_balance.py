"""Balance of generator and discriminator, or of any two optimizers that take turns: one loss that goes to nothing while
the other grows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import DISTANCES, kind_of, near, saved
from healthcheck.probes.looks import next_look

FIRST = 5
"""Losses whose mean is what a side began with."""
KEEP = 0.8
"""Part of the running mean that stays when a loss is added."""
NOTHING = 0.05
"""A side has won below this part of its first losses."""

LOOK_EVERY = 10
"""Steps between two looks while there is one optimizer. A second one ends the rest."""


@dataclass(slots=True)
class _Side:
    """The losses of one optimizer."""

    count: int = 0
    first: float = 0.0
    level: float = 0.0
    regression: bool = False
    """Its loss is the distance to targets that differ from sample to sample: a critic that fits its values."""

    def add(self, loss: float, differ: float) -> None:
        self.count += 1
        self.regression = self.regression or differ > 0
        if self.count <= FIRST:
            self.first += (loss - self.first) / self.count
            self.level = self.first
        else:
            self.level = KEEP * self.level + (1 - KEEP) * loss

    @property
    def settled(self) -> bool:
        return self.count > FIRST and self.first > 0 and self.level >= 0

    @property
    def won(self) -> bool:
        return self.level < NOTHING * self.first and not self.regression


class LossBalanceProbe:
    """Follows the losses of optimizers that take turns, such as those of a GAN.

    A discriminator that separates perfectly has a loss near zero and leaves the generator no gradient; the generator's
    loss (non-saturating: Goodfellow et al., 2014) grows without bound. Losses that begin below zero are passed over:
    they have no zero to go to, but for the saturating loss of a generator, which comes up to it from below. Nobody wins
    by a regression: the critic of an actor that learns to tell returns has a small loss, and is no discriminator (whose
    targets are one number for all that is real, and one for all that is not).
    """

    name = "loss-balance"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.one_sided",
            f"One optimizer's loss divided by its first size, while another's is below {NOTHING:.0%} of its own; else 0.",
            needs=("two optimizers",),
        ),
        Metric(
            "loss.starved",
            f"1 while one optimizer's loss is below {NOTHING:.0%} of its first size and another's has come up from below zero"
            " to as little of its own; else 0.",
            needs=("two optimizers",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._loss: Any = None
        self._differ: Any = 0.0
        self._sides: dict[int, _Side] = {}
        self._indices: set[int] = set()
        """Optimizers that have made an update with a loss of their own."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._loss = number(event.loss)
            self._differ = _targets_differ(event.loss_graph) if self._anyone_new() else 0.0
            return ()
        loss, self._loss = self._loss, None
        differ, self._differ = self._differ, 0.0
        if loss is None:
            return ()
        index, step = event.optimizer_index, event.step
        self._indices.add(index)
        # With one optimizer there is nobody to lose against.
        if len(self._indices) < 2:
            self.rests_until = next_look(step, LOOK_EVERY)
            return ()
        one_sided = calculate(partial(self._judge, index), loss, differ)  # in the order of the steps
        starved = calculate(self._starved, one_sided)  # after the losses have been added to their sides
        return (Sample("loss.one_sided", step, one_sided), Sample("loss.starved", step, starved))

    def _anyone_new(self) -> bool:
        """Whether the kind of some side's loss is still to be found out."""
        sides = self._sides.values()
        return len(self._indices) > 1 and (len(sides) < len(self._indices) or any(s.count <= FIRST for s in sides))

    def _judge(self, index: int, loss: float, differ: float) -> float:
        if math.isfinite(loss):  # the rule on the loss itself names the others
            self._sides.setdefault(index, _Side()).add(loss, differ)
        sides = [side for side in self._sides.values() if side.settled]
        growth = 0.0
        for winner in sides:
            if winner.won:
                growth = max([growth, *(side.level / side.first for side in sides if side is not winner)])
        return growth

    def _starved(self, _: float) -> float:
        """A generator's saturating loss, log(1 - D(G(z))), ends at zero from below when nothing of it is believed."""
        won = [side for side in self._sides.values() if side.settled and side.won]
        lost = (
            s for s in self._sides.values() if s.count > FIRST and s.first < -0.1 and abs(s.level) < NOTHING * -s.first
        )
        return float(bool(won) and any(lost))


def _targets_differ(root: Any) -> Any:
    """1 if the loss holds a distance to targets that are not all one number, else 0."""
    # A discriminator's least-squares loss has one target for a whole batch, a critic's has one for each state.
    for node in near(root):
        targets: Any = saved(node, "target") if kind_of(node) in DISTANCES else None
        if is_tensor(targets) and targets.numel() > 1:
            low, high = targets.detach().aminmax()
            return number((low != high).float())
    return 0.0
