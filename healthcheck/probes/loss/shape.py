"""How the loss was put together: squashed twice, over the wrong dimension, or broadcast against its targets.

Such a loss raises no error, falls a little, and stays far above what the model could reach. Torch's own record of the
operations behind it shows the mistake at the second step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.looks import GraphLooks
from healthcheck.probes.graph.nodes import (
    CROSS_ENTROPIES,
    DISTANCES,
    kind_of,
    near,
    parents_of,
    past_neutral,
    shape_of,
    signed,
    source_of,
)
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = (2, 50, 200, 1000)
"""Backward passes at which it is looked: a few dozen nodes each time. The first may be a trial of the script's, and a
second training may have a loss of its own."""

_SQUASHING = ("Relu", "Sigmoid", "Tanh")
"""Activations that belong between layers; behind the last one they take half of the logits away, or their size."""

_NO_CLASSES = (*DISTANCES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy", "Softplus", "LogSigmoid")
_OF_PROBABILITIES = frozenset((*CROSS_ENTROPIES, "LogSoftmax", "Softmax", "Logsumexp", "Log", "Exp"))
_LAST = 32
"""Last operations of a loss among which a cross entropy by hand has one of these."""


class LossGraphProbe:
    """Counts constructions in the graph of the loss that are mistakes wherever they stand.

    Only what needs no guess: a softmax under a cross entropy that takes one itself, a sigmoid under one that takes one
    itself, an activation on the logits of either, the negative log likelihood or the divergence of values that are no log
    probabilities, a softmax over the batch, a prediction of shape (N, 1) against N targets.
    """

    name = "loss-graph"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.misbuilt",
            "Mistakes found in how the loss was computed, at the second backward pass, the fiftieth, and two later ones.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        self._looks = GraphLooks(LOOKS)
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self._looks.due(event):
            self.rests_until = self._looks.rests_until
            return ()
        found = list(dict.fromkeys(_mistakes(event.loss_graph)))
        facts = {"which": "; ".join(found)}
        return (Sample("loss.misbuilt", event.step, float(len(found)), detail=lambda: facts),)


def classes_of(root: Any) -> int | None:
    """Classes of the cross entropy in a loss; 0 for a loss that is none; None where that cannot be told."""
    other = False
    for node in near(root):
        kind = kind_of(node)
        if kind in CROSS_ENTROPIES:
            shape = shape_of(source_of(node))
            return shape[min(1, len(shape) - 1)] if shape else None
        other = other or kind in _NO_CLASSES
    return 0 if other or not _may_hold_a_cross_entropy(root) else None


def _may_hold_a_cross_entropy(root: Any) -> bool:
    """Whether the last operations include one that cross entropies by hand are made of, or one that is not torch's own."""
    waiting = deque([root])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _LAST:
        node = waiting.popleft()
        if id(node) in seen:
            continue
        seen[id(node)] = node  # kept: torch's wrapper of a node that nobody holds may come back under another id
        kind, backward, _ = type(node).__name__.partition("Backward")
        own = type(node).__module__ == "builtins" and (backward or kind == "AccumulateGrad")
        if not own or kind in _OF_PROBABILITIES:
            return True
        waiting += parents_of(node)
    return False


def why_not_finite(root: Any) -> str:
    """What made a loss NaN or infinite, where its last operations show that; else empty.

    Reads values: only after a hit, and only on the host.
    """
    for node in near(root):
        kind = kind_of(node)
        if kind in CROSS_ENTROPIES:
            weight: Any = saved(node, "total_weight")
            if is_tensor(weight) and on_host(weight) and weight.numel() == 1 and not float(weight):
                return f"cross entropy over no targets: every one is ignore_index ({signed(node._saved_ignore_index)})"
        elif kind in ("Log", "Div"):
            read: Any = saved(node, "self" if kind == "Log" else "other")
            if not is_tensor(read) or not on_host(read):
                continue
            bad = int(((read <= 0) if kind == "Log" else (read == 0)).sum())
            if bad:
                what, how = ("log of", "zero or below") if kind == "Log" else ("a division by", "zero")
                return f"{what} {bad:,} of {read.numel():,} values that are {how}"
    return ""


def _mistakes(root: Any) -> Iterator[str]:
    for node in near(root):
        kind = kind_of(node)
        given = source_of(node)
        if kind in CROSS_ENTROPIES:
            yield from _of_cross_entropy(node, given)
        elif kind == "BinaryCrossEntropyWithLogits":
            squashed = kind_of(past_neutral(given))
            if squashed == "Sigmoid":
                yield "binary_cross_entropy_with_logits of a sigmoid: it takes the sigmoid itself"
            elif squashed in _SQUASHING:
                yield f"binary_cross_entropy_with_logits of a {squashed.lower()}: logits are any number, above and below 0"
        elif kind in (*DISTANCES, "Sub") and (n := _broadcast(node)):
            yield f"a prediction of shape ({n}, 1) against {n} targets: compared each with each, {n} x {n}"
        elif kind == "Sub" and (what := _without_logarithm(node)):
            yield f"kl_div of {what}: its first argument wants log probabilities (log_softmax)"


def _of_cross_entropy(node: Any, given: Any) -> Iterator[str]:
    kind = kind_of(past_neutral(given))
    if kind == "LogSoftmax":
        log_softmax = past_neutral(given)
        squashed = kind_of(past_neutral(source_of(log_softmax)))
        if squashed == "Softmax":
            yield "cross entropy of a softmax: it takes the softmax itself"
        elif squashed in _SQUASHING:
            yield f"cross entropy of a {squashed.lower()}: logits are any number, above and below 0"
        elif given is log_softmax and getattr(given, "_saved_dim", None) == 0 and len(shape_of(given)) == 2:
            yield "log_softmax over dimension 0, which is the batch; the classes are dimension 1"
    elif kind == "Softmax":
        yield "nll_loss of a softmax: it wants log probabilities (log_softmax), or use cross_entropy on the logits"
    elif kind == "Addmm":
        yield "nll_loss of the output of a linear layer: it wants log probabilities, or use cross_entropy"


def _without_logarithm(node: Any) -> str:
    """What stands for the logarithms in ``t * log t - t * log p``, torch's ``kl_div`` of a distribution t; else empty.

    Reads a few values of ``t``, on the host: the same difference may be made of other things.
    """
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or parents[0] is not None or kind_of(parents[1]) != "Mul":
        return ""
    factors = [parent for parent, _ in parents[1].next_functions]
    given = past_neutral(factors[1] if factors[0] is None else factors[0])
    known: Any = saved(parents[1], "self" if factors[0] is None else "other")
    if None not in factors or not _are_probabilities(known):
        return ""
    return {"Softmax": "a softmax", "Sigmoid": "a sigmoid", "Addmm": "the output of a linear layer"}.get(
        kind_of(given), ""
    )


def _are_probabilities(values: Any) -> bool:
    """Rows that are no number below 0, add up to 1, and are not all of one class only."""
    if not is_tensor(values) or not on_host(values) or values.dim() < 2 or not values.numel():
        return False
    rows = values.detach().reshape(-1, values.shape[-1])[:16].float()
    return bool((rows >= 0).all() & ((rows.sum(1) - 1).abs() < 0.01).all() & (rows.amax(1) < 0.999).any())


def _broadcast(node: Any) -> int:
    """N of a prediction (N, 1) against targets (N), which have no gradient: N x N differences. Else 0."""
    shape = shape_of(node) if kind_of(node) == "Sub" else _saved_shape(node)
    parents = parents_of(node)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2 or len(parents) != 1:
        return 0
    given = source_of(parents[0]) if kind_of(parents[0]) == "Expand" else parents[0]
    return shape[0] if shape_of(given) == (shape[0], 1) else 0


def _saved_shape(node: Any) -> tuple[int, ...]:
    kept = saved(node, "self")
    return tuple(kept.shape) if kept is not None else ()
