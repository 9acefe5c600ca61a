"""Targets that the model's output cannot reach: an activation behind its last layer leaves them out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import largest, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import DISTANCES, kind_of, near, past_neutral, regression_targets, saved, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

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
