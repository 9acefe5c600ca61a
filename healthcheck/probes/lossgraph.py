"""How the loss was put together: squashed twice, over the wrong dimension, or broadcast against its targets.

Such a loss raises no error, falls a little, and stays far above what the model could reach. Torch's own record of the
operations behind it shows the mistake at the second step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = (2, 50)
"""Backward passes at which it is looked: a few dozen nodes each time. The first may be a trial of the script's."""
NODES = 64
"""Nodes between the loss and its parts that are followed."""

_NEUTRAL = (
    "View", "Reshape", "UnsafeView", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias",
    "Slice", "Select", "Index",
)  # fmt: skip
_REDUCING = ("Mean", "Sum", "Add", "Mul", "Div", "Neg", "Sub", "Pow", "Abs", "Sqrt", "MulBackward1")
_CROSS_ENTROPIES = ("NllLoss", "NllLoss2D", "NllLossNd")
_DISTANCES = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


class LossGraphProbe:
    """Counts constructions in the graph of the loss that are mistakes wherever they stand.

    Only what needs no guess: a softmax under a cross entropy that takes one itself, a sigmoid under one that takes one
    itself, the negative log likelihood of values that are no log probabilities, a softmax over the batch, a prediction
    of shape (N, 1) against N targets.
    """

    name = "loss-graph"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.misbuilt",
            "Mistakes found in how the loss was computed, at the second backward pass and the fiftieth.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        self._losses = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.loss_graph is None or self._losses > max(LOOKS):
            return ()
        self._losses += 1
        if self._losses not in LOOKS:
            return ()
        found = list(dict.fromkeys(_mistakes(event.loss_graph)))
        facts = {"which": "; ".join(found)}
        return (Sample("loss.misbuilt", event.step, float(len(found)), detail=lambda: facts),)


def why_not_finite(root: Any) -> str:
    """What made a loss NaN or infinite, where its last operations show that; else empty.

    Reads values: only after a hit, and only on the host.
    """
    for node in _near(root):
        kind = _kind(node)
        if kind in _CROSS_ENTROPIES:
            weight: Any = getattr(node, "_saved_total_weight", None)
            if is_tensor(weight) and on_host(weight) and weight.numel() == 1 and not float(weight):
                return f"cross entropy over no targets: every one is ignore_index ({_signed(node._saved_ignore_index)})"
        elif kind in ("Log", "Div"):
            read: Any = getattr(node, "_saved_self" if kind == "Log" else "_saved_other", None)
            if not is_tensor(read) or not on_host(read):
                continue
            bad = int(((read <= 0) if kind == "Log" else (read == 0)).sum())
            if bad:
                what, how = ("log of", "zero or below") if kind == "Log" else ("a division by", "zero")
                return f"{what} {bad:,} of {read.numel():,} values that are {how}"
    return ""


def _near(root: Any) -> Iterator[Any]:
    """The node of the loss, and what it is made of: through sums, means and other arithmetic."""
    waiting, seen = [root], 0
    while waiting and seen < NODES:
        node = waiting.pop()
        seen += 1
        yield node
        if _kind(node) in (*_REDUCING, *_NEUTRAL):
            waiting += [parent for parent, _ in node.next_functions if parent is not None]


def _mistakes(root: Any) -> Iterator[str]:
    for node in _near(root):
        kind = _kind(node)
        given = _given(node)
        if kind in _CROSS_ENTROPIES:
            yield from _of_cross_entropy(node, given)
        elif kind == "BinaryCrossEntropyWithLogits" and _kind(_past_neutral(given)) == "Sigmoid":
            yield "binary_cross_entropy_with_logits of a sigmoid: it takes the sigmoid itself"
        elif kind in (*_DISTANCES, "Sub") and (n := _broadcast(node)):
            yield f"a prediction of shape ({n}, 1) against {n} targets: compared each with each, {n} x {n}"


def _of_cross_entropy(node: Any, given: Any) -> Iterator[str]:
    kind = _kind(_past_neutral(given))
    if kind == "LogSoftmax":
        log_softmax = _past_neutral(given)
        if _kind(_past_neutral(_given(log_softmax))) == "Softmax":
            yield "cross entropy of a softmax: it takes the softmax itself"
        elif given is log_softmax and getattr(given, "_saved_dim", None) == 0 and len(_shape(given)) == 2:
            yield "log_softmax over dimension 0, which is the batch; the classes are dimension 1"
    elif kind == "Softmax":
        yield "nll_loss of a softmax: it wants log probabilities (log_softmax), or use cross_entropy on the logits"
    elif kind == "Addmm":
        yield "nll_loss of the output of a linear layer: it wants log probabilities, or use cross_entropy"


def _broadcast(node: Any) -> int:
    """N of a prediction (N, 1) against targets (N), which have no gradient: N x N differences. Else 0."""
    shape = _shape(node) if _kind(node) == "Sub" else _saved_shape(node)
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2 or len(parents) != 1:
        return 0
    given = _given(parents[0]) if _kind(parents[0]) == "Expand" else parents[0]
    return shape[0] if _shape(given) == (shape[0], 1) else 0


def _kind(node: Any) -> str:
    """``NllLoss`` of ``NllLossBackward0``; empty for no node."""
    return "" if node is None else type(node).__name__.partition("Backward")[0]


def _given(node: Any) -> Any:
    """What made a node's first input."""
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def _past_neutral(node: Any) -> Any:
    for _ in range(8):
        if _kind(node) not in _NEUTRAL:
            break
        node = _given(node)
    return node


def _signed(number: int) -> int:
    """Torch hands out negative numbers of a node as unsigned ones."""
    return number - 2**64 if number >= 2**63 else number


def _shape(node: Any) -> tuple[int, ...]:
    """Shape of what a node made; empty where torch does not tell."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(int(n) for n in metadata[0].shape) if metadata else ()


def _saved_shape(node: Any) -> tuple[int, ...]:
    saved = getattr(node, "_saved_self", None)
    return tuple(saved.shape) if saved is not None else ()
