"""Gradients that an update applies and that are none of its own: of the last, incomplete group of micro-batches of the epoch
before, and of a loss for which another optimizer has stepped already."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.tensors import evenly, on_host
from healthcheck.probes.labels import optimizer_labels, where_called, where_made
from healthcheck.probes.looks import next_look
from healthcheck.probes.step_order import divisor_of

ALIKE = 3
"""Updates in a row with as many backward passes each, after which a larger number is an exception."""
ALONE = 20
"""Updates with one backward pass each after which a run accumulates nothing."""


class IncompleteGroupProbe:
    """Counts the backward passes of each update, where gradients are accumulated.

    With a number of batches that the number of micro-batches does not divide, the last ones of an epoch make no update.
    Gradients that are not cleared then are added to the first update of the next epoch, which so has more passes than all
    others: again and again as many more, after as many updates. That nobody has cleared them in between is proved by
    torch's version counter of a gradient. Accumulation must be seen to be meant: each loss is divided by the number of
    micro-batches, or each pass took a batch from the loader.
    """

    name = "incomplete-groups"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.carried",
            "Updates so far to which the passes of an incomplete group before were added, each as many after as many updates.",
            cost=Cost.HOST,
            needs=("gradient accumulation",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._passes = self._batches = 0
        self._divided = True
        self._usual = (0, 0)
        """Passes of each of the last updates, and how many in a row had so many."""
        self._offset: int | None = None
        """How often the gradient was written in each of them, less their passes."""
        self._gradient: Callable[[], Any] = lambda: None
        self._version = 0
        self._updates = 0
        self._found: list[tuple[int, int]] = []
        """Of each update with more passes: its number, and how many more."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            self._batches += event.phase == "train"
            return ()
        if event.kind is EventKind.LOSS:
            self._passes += 1
            if event.loss_graph is not None:
                self._divided = self._divided and divisor_of(event.loss_graph) > 1
            return ()
        if event.optimizer is None or event.optimizer_index > 0 or self._updates < 0:
            return ()
        if event.loss_scale is not None or (event.model is not None and len(event.model.optimizers()) > 1):
            self._updates, self.rests_until = -1, sys.maxsize  # scalers write gradients as they like
            return ()
        return self._judge(event)

    def _judge(self, event: Event) -> Iterable[Sample]:
        passes, meant = self._passes, self._divided or self._batches == self._passes
        self._passes = self._batches = 0
        self._divided = True
        self._updates += 1
        written = self._written(event.optimizer)
        usual, row = self._usual
        if passes == usual:
            self._usual = usual, row + 1
            if written is not None:
                self._offset = written - passes
            if usual == 1 and row >= ALONE:
                self.rests_until = event.step + 100
            return (Sample("updates.carried", event.step, float(self._count())),) if usual > 1 else ()
        settled = row >= ALIKE and usual > 1
        if not settled or not meant or written is None or not usual < passes < 2 * usual:
            # Smaller groups are how most loops end an epoch: the usual number stays the same.
            if not settled or passes > usual:
                self._usual, self._found = (passes, 1), []
            return ()
        if self._offset is None or written - passes != self._offset:
            return ()  # somebody cleared them
        self._found.append((self._updates, passes - usual))
        carried = self._count()
        facts = {"passes": f"{passes} backward passes in this update, {usual} in those before"}
        facts |= where_called(event, "backward")
        return (Sample("updates.carried", event.step, float(carried), detail=lambda: facts),)

    def _count(self) -> int:
        """The last exceptions that were alike: as many passes more, after as many updates."""
        found = self._found
        if len(found) < 2:
            return len(found)
        extra, gap, alike = found[-1][1], found[-1][0] - found[-2][0], 2
        for at in range(len(found) - 2, 0, -1):
            if found[at][1] != extra or found[at][0] - found[at - 1][0] != gap:
                break
            alike += 1
        return alike if found[-2][1] == extra else 1

    def _written(self, optimizer: Any) -> int | None:
        """How often the gradient looked at was written since the last update, but for an offset; None if unknown."""
        gradient = next((p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None), None)
        if gradient is None:
            return None
        known, before = self._gradient() is gradient, self._version
        self._gradient, self._version = weakref.ref(gradient), int(gradient._version)
        return self._version - before if known else self._version


REST = 50
"""Steps between two looks for a second optimizer."""
TENSORS = 16
"""Tensors looked at, spread over the optimizer's."""
MOST = 0.9
"""Share of the tensors with a gradient that had one before, from which on the other loss went through the same network."""


@dataclass(slots=True)
class _Window:
    """What is known of one optimizer since its last update."""

    held: Any = None
    """Whether gradients were there at the last backward pass, after another optimizer had stepped: a bool or a tensor."""
    looked_at: int = 0
    """How many of the tensors had one then."""
    passes: int = 0


@dataclass(slots=True)
class _Pending:
    """A finding that waits for the next backward pass: no other optimizer may step until then."""

    index: int
    sample: Sample


class OtherLossProbe:
    """Looks, where several optimizers take turns, for gradients that a loss of one of them has left in another's.

    The generator's loss goes through the discriminator and leaves gradients there. Where these are not cleared before the
    discriminator's own backward pass, its optimizer applies both, and the first of them has the wrong sign. Found where
    one optimizer has stepped after a backward pass, gradients of it are still there at the next pass, and only the other
    optimizer steps after that. An optimizer that steps more rarely than the other accumulates on purpose: the other one
    steps after each pass, the last included.
    """

    name = "other-loss"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.of_other_loss",
            "1 if an update applies gradients of a loss for which another optimizer has stepped already, else 0.",
            cost=Cost.DEVICE,
            needs=("several optimizers",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._windows: dict[int, _Window] = {}
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last backward pass."""
        self._pending: list[_Pending] = []
        self._looked: dict[int, list[Callable[[], Any]]] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if len(event.model.optimizers()) < 2:  # a new one ends the rest
            self.rests_until = next_look(event.step, REST)
            return ()
        if event.kind is EventKind.LOSS:
            return self._pass_begins(event, demand)
        if event.optimizer is not None:
            self._update(event, demand)
        return ()

    def _pass_begins(self, event: Event, demand: Demand) -> Iterable[Sample]:
        stepped, self._stepped = self._stepped, set()
        pending, self._pending = self._pending, []
        due = demand.due("grads.of_other_loss", event.step) or demand.due("grads.of_other_loss", event.step + 1)
        for index, window in self._windows.items():
            window.passes += 1
            if due and window.passes > 1 and stepped - {index}:
                window.held, window.looked_at = _there(self._looked.get(index, ()))
        return [item.sample for item in pending if stepped == {item.index}]

    def _update(self, event: Event, demand: Demand) -> None:
        index, optimizer = event.optimizer_index, event.optimizer
        self._stepped.add(index)
        window, self._windows[index] = self._windows.get(index), _Window()
        if index not in self._looked:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._looked[index] = [weakref.ref(p) for p in evenly(params, TENSORS)]
        if window is None or not demand.due("grads.of_other_loss", event.step):
            return
        now = [p for ref in self._looked[index] if (p := ref()) is not None and p.grad is not None]
        held: Any = False
        if window.held is not None and now and window.looked_at >= MOST * len(now):
            held = window.held
        value = float(held) if type(held) is bool else number(held)
        facts = {"passes": f"{window.passes} backward passes went into this update"}
        facts |= where_made(event, optimizer, "zero_grad") or where_called(event, "zero_grad")
        labels = optimizer_labels(index)
        sample = Sample("grads.of_other_loss", event.step, value, labels, detail=lambda: facts)
        self._pending.append(_Pending(index, sample))


def _there(looked: Sequence[Callable[[], Any]]) -> tuple[Any, int]:
    """Whether some gradient of these tensors is not zero, and how many there are."""
    import torch

    gradients = [p.grad for ref in looked if (p := ref()) is not None and p.grad is not None]
    gradients = [g for g in gradients if g.layout is torch.strided]
    if not gradients:
        return False, 0
    few = sorted(gradients, key=lambda g: int(g.numel()))[:4]
    if all(map(on_host, few)):
        return any(bool(g.any()) for g in few), len(gradients)
    return torch.stack([g.any() for g in few]).any(), len(gradients)
