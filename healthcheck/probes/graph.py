"""Torch's graph of a loss, read and never run: from the loss to what it was made of, and what each node kept."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection
from typing import Any

from healthcheck.device.tensors import is_tensor, on_host

NODES = 64
"""Nodes between the loss and its parts that are followed."""
MOST = 20_000
"""Nodes of a whole graph that are followed; some thousands are usual."""

NEUTRAL = (
    "View", "Reshape", "UnsafeView", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias",
    "Slice", "Select", "Index",
)  # fmt: skip
REDUCING = ("Mean", "Sum", "Add", "Mul", "Div", "Neg", "Sub", "Pow", "Abs", "Sqrt")
_NEAR = frozenset((*REDUCING, *NEUTRAL))
CROSS_ENTROPIES = ("NllLoss", "NllLoss2D", "NllLossNd")
DISTANCES = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


# Some of this runs in every step: walks ask nodes for their kind in place, and give lists.


def near(root: Any) -> list[Any]:
    """The node of the loss, and what it is made of: through sums, means and other arithmetic. A node that is used
    twice comes twice."""
    waiting, found = [root], list[Any]()
    while waiting and len(found) < NODES:
        node = waiting.pop()
        found.append(node)
        if type(node).__name__.partition("Backward")[0] in _NEAR:
            for parent, _ in node.next_functions:
                if parent is not None:
                    waiting.append(parent)
    return found


def made_of(root: Any, through: Collection[str], most: int = NODES) -> list[tuple[Any, str]]:
    """The node of the loss and what it was made from, through nodes of these kinds: each once, nearest first, with its
    kind.

    The list keeps torch's wrappers alive: that of a node that nobody holds may come back under another ``id``.
    """
    nodes, known = [root], {id(root)}
    found: list[tuple[Any, str]] = []
    for node in nodes:
        kind = type(node).__name__.partition("Backward")[0]
        found.append((node, kind))
        if len(found) >= most:
            break
        if kind in through:
            for parent, _ in node.next_functions:
                if parent is not None and id(parent) not in known:
                    known.add(id(parent))
                    nodes.append(parent)
    return found


def kind_of(node: Any) -> str:
    """``NllLoss`` of ``NllLossBackward0``; empty for no node."""
    return "" if node is None else type(node).__name__.partition("Backward")[0]


def parents_of(node: Any) -> list[Any]:
    """What a node was made from, as far as gradients go there."""
    found = []
    for parent, _ in node.next_functions:
        if parent is not None:
            found.append(parent)
    return found


def source_of(node: Any) -> Any:
    """What made a node's first input."""
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def past_neutral(node: Any) -> Any:
    """The first node on the way back that does more than arrange its values anew."""
    for _ in range(8):
        if node is None or type(node).__name__.partition("Backward")[0] not in NEUTRAL:
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def cross_entropy_of(root: Any) -> Any:
    """The first of the :data:`CROSS_ENTROPIES` that a loss is made of, by its node; None without one."""
    for node in near(root):
        if type(node).__name__.partition("Backward")[0] in CROSS_ENTROPIES:
            return node
    return None


def shape_of(node: Any) -> tuple[int, ...]:
    """Shape of what a node made; empty where torch does not tell."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(map(int, metadata[0].shape)) if metadata else ()


def signed(number: int) -> int:
    """Torch hands out negative numbers of a node as unsigned ones."""
    return number - 2**64 if number >= 2**63 else number


def log_probabilities(loss: Any) -> Any:
    """What a cross entropy was computed from: a tensor of shape (..., classes), without a graph; None where it is not kept.

    :param loss: node of one of the :data:`CROSS_ENTROPIES`, however its input was written: ``cross_entropy`` of logits,
        or ``nll_loss`` of a ``log_softmax`` over any dimension, with views between.
    """
    softmax = past_neutral(loss.next_functions[0][0])
    if softmax is None or not type(softmax).__name__.startswith("LogSoftmaxBackward"):
        return None
    result: Any = saved(softmax, "result")
    if result is None or not result.dim():
        return None
    return result.detach().movedim(dimension(softmax, result.dim()), -1)


def dimension(node: Any, of: int) -> int:
    """The dimension that a node works along, from 0 to ``of - 1``, as negative ones count from behind."""
    return signed(int(node._saved_dim)) % of


def all_behind(root: Any) -> list[Any]:
    """Every node behind ``root``, each after those that it was made from; empty if there are too many.

    The list keeps torch's wrappers alive, so that the same node has the same ``id`` while it is looked at.
    """
    order: list[Any] = []
    known: dict[int, Any] = {}
    # Depth first without recursion: graphs are thousands of nodes deep.
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
            continue
        if id(node) in known:
            continue
        if len(known) >= MOST:
            return []
        known[id(node)] = node
        waiting.append((node, True))
        for parent, _ in node.next_functions:
            if parent is not None:
                waiting.append((parent, False))
    return order


def kinds_behind(root: Any) -> list[tuple[Any, str]]:
    """The same, each with its kind."""
    return [(node, type(node).__name__.partition("Backward")[0]) for node in all_behind(root)]


def saved(node: Any, name: str) -> Any:
    """A tensor that a node keeps for its backward pass (``_saved_NAME``); None if it keeps none.

    None as well where reading it has a price: activation checkpointing would run a part of the model anew, and
    offloading would fetch it back.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return None
    for part in raw if isinstance(raw, (tuple, list)) else (raw,):  # several: the indices of ``x[rows, columns]``
        if getattr(part, "unpack_hook", None) is not None:
            return None
    return getattr(node, f"_saved_{name}", None)


def made_by(node: Any, most: int) -> Any:
    """What a node made, at most about so many of its rows, at even distances: a tensor without a graph, or None.

    Read from what the node keeps, or calculated once more where that is a product of what it keeps.
    """
    kind = kind_of(node)
    if kind in ("Addmm", "Mm"):
        first, second = ("mat1", "mat2") if kind == "Addmm" else ("self", "mat2")
        rows, columns = saved(node, first), saved(node, second)
        if not is_tensor(rows) or not is_tensor(columns):
            return None
        product = rows.detach()[:: max(1, -(-rows.shape[0] // most))] @ columns.detach()
        bias = getattr(source_of(node), "variable", None) if kind == "Addmm" else None
        return product if bias is None else product + bias.detach()
    if kind == "Div":
        whole, part = saved(node, "self"), saved(node, "other")
        return whole.detach() / part.detach() if is_tensor(whole) and is_tensor(part) else None
    result = saved(node, "result")
    return result.detach() if is_tensor(result) else None


_SAME_ORDER = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Alias", "Clone")


def _answers(node: Any, like: Any) -> Any:
    """What a node made, in the shape of ``like``, also where it was looked at in another shape; None if it is not known."""
    answers = made_by(node, sys.maxsize)
    for _ in range(4):
        if is_tensor(answers) or kind_of(node) not in _SAME_ORDER:
            break
        node = source_of(node)
        answers = made_by(node, sys.maxsize)
    return answers.reshape(like.shape) if is_tensor(answers) and answers.numel() == like.numel() else None


def regression_targets(root: Any) -> list[Any]:
    """Targets of the squared and absolute errors that a loss is made of, without a graph.

    Of errors by hand, ``(answers - targets).abs()``, torch keeps the differences alone: there the answers are calculated
    once more, where that is one product.
    """
    found = []
    for node in near(root):
        kind = type(node).__name__.partition("Backward")[0]
        if kind in DISTANCES:
            found.append(saved(node, "target"))
        elif kind in ("Pow", "Abs", "Mul"):
            apart, source = saved(node, "self"), past_neutral(source_of(node))
            inputs = [parent for parent, _ in source.next_functions] if kind_of(source) == "Sub" else []
            if not is_tensor(apart) or inputs.count(None) != 1 or len(inputs) != 2:
                continue
            answers = _answers(inputs[0] or inputs[1], apart)
            if is_tensor(answers) and answers.shape == apart.shape:
                found.append(answers - apart.detach() if inputs[0] is not None else answers + apart.detach())
    return [targets.detach() for targets in found if is_tensor(targets) and targets.numel() > 1]


def keeps(node: Any, name: str) -> bool | None:
    """Whether a node keeps a tensor of this name, without reading it; None where torch does not tell."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None else getattr(raw, "data", None) is not None


# -- what the graph of a loss says ---------------------------------------------------------

_NO_CLASSES = (*DISTANCES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy", "Softplus", "LogSigmoid")

_OF_PROBABILITIES = frozenset((*CROSS_ENTROPIES, "LogSoftmax", "Softmax", "Logsumexp", "Log", "Exp"))

_LAST = 32
"""Last operations of a loss among which a cross entropy by hand has one of these."""


def classes_of(root: Any) -> int | None:
    """Classes of the cross entropy in a loss; 0 for a loss that is none; None where that is unknown."""
    other = False
    for node in near(root):
        kind = type(node).__name__.partition("Backward")[0]
        if kind in CROSS_ENTROPIES:
            shape = shape_of(node.next_functions[0][0])
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
        elif kind == "Xlogy":
            target: Any = saved(node, "self")
            if is_tensor(target) and on_host(target) and bool((target < 0).any()):
                return "kl_div from values below 0: it takes the logarithm of the prediction first, then the target"
        elif kind in ("Log", "Div"):
            read: Any = saved(node, "self" if kind == "Log" else "other")
            if not is_tensor(read) or not on_host(read):
                continue
            bad = int(((read <= 0) if kind == "Log" else (read == 0)).sum())
            if bad:
                what, how = ("log of", "zero or below") if kind == "Log" else ("a division by", "zero")
                return f"{what} {bad:,} of {read.numel():,} values that are {how}"
    return ""
