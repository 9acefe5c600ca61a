"""Targets of a regression from which nothing can be learnt: an activation behind the model's last layer leaves them out, or they
are all one number."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, largest, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import DISTANCES, kind_of, near, past_neutral, regression_targets, saved, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe, ask_again, spread_over_ranks

LOOKS = (3, 50, 200, 1000)
"""Backward passes whose graph is looked at, a few dozen nodes each time."""
MARGIN = 0.05
"""How far outside the range a target must be, as a part of the spread of all: noise may lie just outside."""

RANGES = {
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "LogSoftmax": (-math.inf, 0.0),
    "LogSigmoid": (-math.inf, 0.0),
}
"""Least and largest value that an activation puts out."""


class UnreachableTargetProbe(GraphProbe):
    """Compares the targets of squared and absolute errors with the range of the activation that made the output.

    A ReLU puts out nothing below 0, a sigmoid nothing above 1: a model that ends with one of them never gets to targets
    beyond that, however long it trains. Of a binary cross entropy the targets are probabilities: with masks of 0 and 255 its
    loss has no lower bound. Errors may be torch's own functions or written by hand, where torch's graph keeps
    what is needed. Nothing is said of outputs that are scaled after the activation.
    """

    name = "output-range"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.unreachable",
            "Part of a regression's targets outside of what the activation behind the last layer can put out.",
            "fraction",
            Cost.DEVICE,
            needs=("the graph of the loss", "a regression whose output is an activation"),
        ),
        Metric(
            "outputs.clamped",
            "Part of the outputs that lie outside of the range to which they are clamped right before the loss: they get no gradient.",
            "fraction",
            Cost.DEVICE,
            needs=("the graph of the loss", "outputs that are clamped"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        samples = []
        found = list(_outside(event.loss_graph))
        place = where_called(event, "backward")
        if found:
            facts = {"output": ", ".join(dict.fromkeys(said for _, said in found))} | place
            parts = largest([part for part, _ in found])
            samples.append(Sample("targets.unreachable", event.step, parts, detail=lambda: facts))
        clamped = list(_clamped(event.loss_graph))
        if clamped:
            said = {"range": ", ".join(dict.fromkeys(words for _, words in clamped))} | place
            most = largest([part for part, _ in clamped])
            samples.append(Sample("outputs.clamped", event.step, most, detail=lambda: said))
        return samples


def _clamped(root: Any) -> Iterator[tuple[Any, str]]:
    """For each error of clamped outputs: which part of these lies outside, and the range."""
    for node in near(root):
        kind = kind_of(node)
        if kind in DISTANCES or kind == "BinaryCrossEntropy":
            inputs = [source_of(node)]
        elif kind == "Sub":
            inputs = [parent for parent, _ in node.next_functions if parent is not None]
            inputs = inputs if len(inputs) == 1 else []
        else:
            continue
        clamp = past_neutral(inputs[0]) if inputs else None
        if kind_of(clamp) not in ("Clamp", "Hardtanh") or kind_of(past_neutral(source_of(clamp))) in RANGES:
            continue  # what an activation keeps in a range is clamped against rounding alone
        values: Any = saved(clamp, "self")
        least, most = (getattr(clamp, f"_saved_{name}", None) for name in ("min", "max"))
        if least is None and most is None:
            least, most = (getattr(clamp, f"_saved_{name}_val", None) for name in ("min", "max"))
        if not is_tensor(values) or values.numel() < 2 or any(is_tensor(bound) for bound in (least, most)):
            continue
        low = -math.inf if least is None else float(least)
        high = math.inf if most is None else float(most)
        inside = values.detach()
        yield number(((inside < low) | (inside > high)).float().mean()), _words(low, high)


def _outside(root: Any) -> Iterator[tuple[Any, str]]:
    """For each error whose output is an activation: which part of its targets is out of reach, and what it is of."""
    for node in near(root):
        kind = kind_of(node)
        if kind == "BinaryCrossEntropyWithLogits":
            targets = saved(node, "target")
            if is_tensor(targets) and targets.numel() > 1:
                yield (
                    number(_part_outside(targets.detach(), 0.0, 1.0)),
                    "a probability, 0 to 1, whose sigmoid the loss takes",
                )
            continue
        if kind in DISTANCES:
            inputs, targets = [source_of(node)], saved(node, "target")
        elif kind == "Sub":
            inputs = [parent for parent, _ in node.next_functions]
            inputs = [parent for parent in inputs if parent is not None] if inputs.count(None) == 1 else []
            targets = None
        else:
            continue
        activation = kind_of(past_neutral(inputs[0])) if inputs else ""
        if activation not in RANGES:
            continue
        if targets is None:  # written by hand: the difference is what torch keeps
            targets = next(iter(regression_targets(root)), None)
        if is_tensor(targets) and targets.is_floating_point() and targets.numel() > 1:
            least, most = RANGES[activation]
            said = f"{activation.lower()}, which puts out {_words(least, most)}"
            yield number(_part_outside(targets.detach(), least, most)), said


def _part_outside(targets: Any, least: float, most: float) -> Any:
    """A 0-dim tensor on the device of the targets. NaN among them count as outside of nothing."""
    values = targets.float()
    margin = MARGIN * values.std()
    return ((values < least - margin) | (values > most + margin)).float().mean()


def _words(least: float, most: float) -> str:
    if most == math.inf:
        return f"nothing below {least:g}"
    if least == -math.inf:
        return f"nothing above {most:g}"
    return f"{least:g} to {most:g}"


# --------------------------------------------------------------------------------------------------
# Targets that are all one number.


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
        self._differ = False

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

        def constant(one: float, other: float) -> float:
            self._differ = one != other
            return 0.0 if self._differ else count

        value = calculate(constant, number(low), number(high))
        if self._differ and not spread_over_ranks(low):  # and for good: the two ends never come nearer
            self.rests_until = sys.maxsize
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
