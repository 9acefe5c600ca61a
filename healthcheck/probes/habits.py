"""Calls of torch that say something by how often they come: the same seed in each step, weights drawn after they were loaded,
samples that cut gradients off, dropout that is drawn again for the backward pass, plateaus that are looked for in each batch."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import NO_LABELS, Cost, Metric, Sample
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import all_behind, kind_of, saved
from healthcheck.probes.labels import first_few, optimizer_labels, where_called, where_made
from healthcheck.probes.looks import GraphProbe

PART = 0.5
"""Part of the weight matrices of an optimizer from which on they count as drawn anew."""
OFTEN = 0.9
"""Calls for each update from which on it is one in each."""
SHORT = 100
"""Patience of a scheduler that is shorter than an epoch of so many updates, at the least one of :data:`FEW`."""
FEW = 5
_OF_OPTIMIZER = ("params.redrawn_loaded", "params.redrawn", "schedule.begun_again")
BACK = 0.9
"""Part of the rate that a schedule began with from which on a resumed optimizer is back at its beginning."""
UP = 1.5
"""Rate after the first step of a scheduler, as a part of that which the optimizer was resumed with."""
WHOLE = 4
"""Batches of a loader from which on a pass of one of them is a cut one."""


class HabitProbe:
    """Judges every twenty updates what was noted of a few functions of torch.

    *Seeds*: the same seed was set once for each update or more often since the last look, and is the one in use: each step
    gets the same random numbers. *Redrawn*: half of an optimizer's weight matrices were written by functions of ``torch.nn.init``
    after they were loaded from a checkpoint, or between updates of this same optimizer. *Plateau*: a ``ReduceLROnPlateau`` that
    is asked after each update and has a patience shorter than an epoch, or one that waits for a rise (``mode="max"``) and lowered
    the rate whenever the number it was given was as low as never before: a loss. *Begun again*: the optimizer was resumed at a
    rate that its schedule had lowered, and a scheduler that was given no state has put it back to the first one. *Cut passes*: each ``for``
    over a loader is left after its first batch, by a ``break`` or ``return`` that debugging has left there, or that stands too far right.
    """

    name = "habits"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "random.same_seed", "1 if the same seed was set in each update since the last look, else 0.", cost=Cost.HOST
        ),
        Metric(
            "params.redrawn_loaded",
            "Weights that were drawn at random after they had been loaded, if they are half of an optimizer's; else 0.",
            cost=Cost.HOST,
        ),
        Metric(
            "params.redrawn",
            "Weights that were drawn at random between two updates of their optimizer, if they are half of all; else 0.",
            cost=Cost.HOST,
        ),
        Metric(
            "schedule.waits_for_rise",
            "How often a ReduceLROnPlateau with mode='max' lowered the rate at the lowest number that it had been given.",
            cost=Cost.HOST,
            needs=("a ReduceLROnPlateau",),
        ),
        Metric(
            "schedule.plateau_calls",
            "Calls of a ReduceLROnPlateau in one pass over the data, if it lowers the rate within one; else 0.",
            cost=Cost.HOST,
            needs=("a ReduceLROnPlateau",),
        ),
        Metric(
            "schedule.begun_again",
            "Rate of a resumed optimizer, divided by that which it was resumed with, if it is back where its schedule began; else 0.",
            cost=Cost.HOST,
            needs=("a resumed optimizer",),
        ),
        Metric(
            "loader.cut_passes",
            "Loops over a loader in a row that were left after their first batch, if that is how updates get their batches; else 0.",
            cost=Cost.HOST,
            needs=("a batch from a loader",),
        ),
        Metric(
            "workers.unheard",
            "Values of a data set that are changed from pass to pass while its workers live on with the first ones.",
            cost=Cost.HOST,
            needs=("loader workers that live through all passes",),
        ),
        Metric(
            "random.unkept",
            "1 if a part of the model with dropout is computed again for the backward pass without its random state, else 0.",
            cost=Cost.HOST,
        ),
    )
    _KEYS = tuple(metric.name for metric in provides)

    def __init__(self) -> None:
        self._seeds: tuple[int | None, int, int] = (None, 0, 0)
        """Seed, calls and step at the last look."""
        self._resumed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Optimizers that were looked at since they were resumed."""
        self._cut = (0, 0)
        """Cut passes and step at the last look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is None or not event.run.habits.seen or event.optimizer is None:
            return ()
        # Weights are those of one optimizer, which may be the second of the process; the rest is the run's.
        keys = _OF_OPTIMIZER if event.optimizer_index > 0 else self._KEYS
        due = [key for key in keys if demand.due(key, event.step)]
        habits = event.run.habits
        samples = []
        for key in due:
            value, facts = 0.0, dict[str, Any]()
            if key == "random.same_seed":
                value = float(self._same_seed(event))
                facts = {"seed": str(habits.seed)} | ({"where": habits.seeded_at} if habits.seeded_at else {})
            elif key == "params.redrawn_loaded":
                value = float(_redrawn(event, after_load=True))
            elif key == "params.redrawn":
                value = float(_redrawn(event, after_load=False))
            elif key == "schedule.begun_again":
                value, facts = self._begun_again(event)
            elif key == "loader.cut_passes":
                value, facts = self._cut_passes(event)
            elif key == "workers.unheard":
                which = first_few(f"{name}, {change}" for name, change in habits.unheard.items())
                value, facts = float(len(habits.unheard)), {"which": which} | where_called(event, "loader")
            elif key == "random.unkept":
                value, facts = float(bool(habits.unkept_random)), {"which": habits.unkept_random}
            else:
                judged = _waiting(event, key)
                if judged is None:
                    continue
                value, facts = judged
            detail = (lambda facts=facts: facts) if value and facts else None
            labels = optimizer_labels(event.optimizer_index) if key in _OF_OPTIMIZER else NO_LABELS
            samples.append(Sample(key, event.step, value, labels, detail=detail))
        return samples

    def _begun_again(self, event: Event) -> tuple[float, dict[str, Any]]:
        assert event.run is not None
        habits, optimizer = event.run.habits, event.optimizer
        loaded = habits.resumed_rates.get(optimizer)
        if loaded is None:
            return 0.0, {}
        at_once = self._resumed.get(optimizer) is not loaded
        self._resumed[optimizer] = loaded
        (low, first), rate = loaded, optimizer.param_groups[0].get("lr")
        own = [s for s in event.run.places.things("stepped") if getattr(s, "optimizer", None) is optimizer]
        if not isinstance(rate, float) or any(s in habits.resumed_schedules for s in own):
            return 0.0, {}
        begins = any(int(s.last_epoch) <= 1 for s in own)
        if not (at_once and rate >= BACK * first) and not (begins and rate >= UP * low):
            return 0.0, {}
        where = next((where_made(event, s, "stepped") for s in own), {})
        return rate / low, {"rate": f"{low:.3g} where it was resumed, {rate:.3g} now"} | where

    def _cut_passes(self, event: Event) -> tuple[float, dict[str, Any]]:
        assert event.run is not None
        known = [passes for passes in event.run.habits.cut_passes.values() if passes[1] >= WHOLE]
        now, batches = max(known, default=(0, 0))
        count, step = self._cut
        self._cut = now, event.step
        # Two updates or more for each such pass: somebody else is trained on, and this is a look at the data.
        if now <= count or event.step - step > 1.5 * (now - count):
            return 0.0, {}
        return float(now), {"batches of a whole pass": f"{batches:,}"} | where_called(event, "loader")

    def _same_seed(self, event: Event) -> bool:
        import torch

        assert event.run is not None
        habits = event.run.habits
        seed, calls, step = self._seeds
        self._seeds = habits.seed, habits.seeded, event.step
        passed = event.step - step
        if habits.seed is None or seed != habits.seed or not passed:
            return False
        return habits.seeded - calls >= OFTEN * passed and torch.initial_seed() == habits.seed


def _redrawn(event: Event, *, after_load: bool) -> int:
    """How many weight matrices of the optimizer were drawn anew, if half of them were. What is counted once is forgotten."""
    assert event.run is not None
    habits = event.run.habits
    if not habits.redrawn:
        return 0
    own = [p for group in event.optimizer.param_groups for p in group["params"] if p.dim() >= 2]
    # Between two updates of this very optimizer: a new training with a new one begins anew on purpose.
    found = [p for p in own if habits.was_redrawn(p, None if after_load else event.optimizer)]
    if not own or len(found) < PART * len(own):
        return 0
    return len(found)


def _waiting(event: Event, key: str) -> tuple[float, dict[str, Any]] | None:
    assert event.run is not None
    plateaus = [(s, use) for s, use in list(event.run.habits.plateaus.items()) if use.calls]
    if not plateaus:
        return None
    if key == "schedule.waits_for_rise":
        scheduler, use = max(plateaus, key=lambda pair: pair[1].at_lowest)
        return float(use.at_lowest), where_made(event, scheduler)
    worst, facts = 0.0, dict[str, Any]()
    for scheduler, use in plateaus:
        per_update = use.calls >= OFTEN * event.step and event.step >= SHORT / 2
        if per_update and use.reductions >= 2 and event.run.habits.longest_pass >= FEW:
            in_pass = float(event.run.habits.longest_pass)
            if scheduler.patience < in_pass and in_pass > worst:
                worst = in_pass
                facts = {"patience": f"{scheduler.patience}", "lowered": f"{use.reductions} times"} | where_made(
                    event, scheduler
                )
    return worst, facts


LOOKS = (2, 50)
_READING = {"Addmm": "mat1", "Mm": "self", "Bmm": "self", "Convolution": "input"}


class CutSampleProbe(GraphProbe):
    """Looks whether a layer reads what was drawn with ``sample()`` from a distribution with trained parameters.

    ``sample()`` draws without a graph: what is computed from the result says nothing to the network that has put out mean and
    spread; ``rsample()`` keeps the way. Drawing without gradients is right for policy gradients, which ask for log
    probabilities: runs that do are left alone.
    """

    name = "cut-samples"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.cut_samples",
            "Layers that read values drawn with sample() from a normal distribution whose parameters are trained.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event) or event.run is None:
            return ()
        habits = event.run.habits
        if not habits.seen:
            return ()
        drawn = [tensor for ref in habits.drawn if (tensor := ref()) is not None]
        if habits.scored or not drawn:
            return (Sample("loss.cut_samples", event.step, 0.0),)
        places = {tensor.untyped_storage().data_ptr() for tensor in drawn}
        found = []
        for node in all_behind(event.loss_graph):
            name = _READING.get(kind_of(node))
            read: Any = saved(node, name) if name else None
            if is_tensor(read) and read.untyped_storage().data_ptr() in places:
                found.append(f"{kind_of(node).lower()} of shape {tuple(read.shape)}")
        facts = {"which": first_few(found)} | where_called(event, "backward")
        detail = (lambda: facts) if found else None
        return (Sample("loss.cut_samples", event.step, float(len(found)), detail=detail),)


PENALTY_LOOKS = (2, 3, 10, 11, 50, 51)
"""Backward passes that are looked at: losses of a game take turns."""


class PenaltyProbe(GraphProbe):
    """Looks for a loss with a constant term in a run that asks for gradients of inputs without a graph.

    ``torch.autograd.grad(outputs, inputs)`` gives numbers. A penalty of them (WGAN-GP, R1) is a constant in the loss, and trains
    nothing, unless ``create_graph=True`` is passed.
    """

    name = "penalties"
    looks_at = PENALTY_LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.constant_penalty",
            "1 if a loss has a term without gradients, and gradients of inputs were asked for without a graph, else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a gradient penalty"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event) or event.run is None:
            return ()
        if not event.run.habits.plain_gradients:
            return ()
        facts = where_called(event, "backward")
        value = float(_adds_a_constant(event.loss_graph))
        if value:
            self.rests_until = sys.maxsize  # the loss of the other side has no penalty: that says nothing
        return (Sample("loss.constant_penalty", event.step, value, detail=(lambda: facts) if value else None),)


def _adds_a_constant(root: Any) -> bool:
    """Whether one of the terms that a loss is the sum of has no graph."""
    waiting = [root]
    for _ in range(16):
        if not waiting:
            break
        node = waiting.pop()
        if kind_of(node) in ("Add", "Sub"):
            parents = [parent for parent, _ in node.next_functions]
            if len(parents) == 2 and parents.count(None) == 1:
                return True
            waiting += [parent for parent in parents if parent is not None]
        elif kind_of(node) == "Neg":
            waiting.append(node.next_functions[0][0])
    return False
