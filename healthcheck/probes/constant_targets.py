"""Targets of a regression that are all one number."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import DISTANCES, kind_of, near, past_neutral, saved, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import ask_again

FEW = 4
"""Looks without targets after which a run is taken to have none."""
_ERRORS = (*DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_LAYERS = ("Addmm", "Mm", "Convolution", "Sigmoid", "Tanh", "Relu", "Softplus", "LeakyRelu")
_AROUND = ("Mean", "Sum", "Div", "Mul")


class ConstantTargetProbe:
    """Counts targets in a row that were one single number, of a loss that is one error of a layer's output and nothing else.

    Residuals that are compared with zero, as of a differential equation, are no output of a layer; a penalty is one term of several;
    the two sides of a game have an optimizer each.
    """

    name = "constant-targets"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.constant",
            "Targets in a row, of a regression or a binary cross entropy, that were one single number.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "squared or absolute errors, or a binary cross entropy"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._empty = self._count = 0
        self._ends: Any = None
        """Smallest and largest target so far: two 0-dim tensors."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.phase != "train" or not demand.due("targets.constant", event.step):
            return ()
        import torch

        targets = sole_targets(event.loss_graph)
        if targets is None:
            self._empty += 1
            self.rests_until = sys.maxsize if self._empty >= FEW and not self._count else ask_again(event.step)
            return ()
        low, high = targets.amin(), targets.amax()
        if self._ends is not None and self._ends[0].device == low.device:
            low, high = torch.minimum(low, self._ends[0]), torch.maximum(high, self._ends[1])
        self._ends = low, high
        self._count += targets.numel()
        count, place = float(self._count), where_called(event, "backward")
        value = calculate(lambda one, other: count if one == other else 0.0, number(low), number(high))
        return (Sample("targets.constant", event.step, value, detail=lambda: place),)


def sole_targets(root: Any) -> Any:
    """Targets of a loss that is one error of a layer's output: a tensor without a graph, or None."""
    nodes = near(root)
    errors = [node for node in nodes if kind_of(node) in _ERRORS]
    if len(errors) != 1 or any(kind_of(node) not in (*_ERRORS, *_AROUND) for node in nodes):
        return None
    targets: Any = saved(errors[0], "target")
    made = past_neutral(source_of(errors[0]))
    if not is_tensor(targets) or targets.numel() < 2 or not targets.is_floating_point() or kind_of(made) not in _LAYERS:
        return None
    return targets.detach().float()
