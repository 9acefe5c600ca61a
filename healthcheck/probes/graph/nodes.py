"""Torch's graph of a loss, walked from the loss to what it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NODES = 64
"""Nodes between the loss and its parts that are followed."""

NEUTRAL = (
    "View", "Reshape", "UnsafeView", "Transpose", "Permute", "T", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias",
    "Slice", "Select", "Index",
)  # fmt: skip
REDUCING = ("Mean", "Sum", "Add", "Mul", "Div", "Neg", "Sub", "Pow", "Abs", "Sqrt", "MulBackward1")
CROSS_ENTROPIES = ("NllLoss", "NllLoss2D", "NllLossNd")
DISTANCES = ("MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


def near(root: Any) -> Iterator[Any]:
    """The node of the loss, and what it is made of: through sums, means and other arithmetic."""
    waiting, seen = [root], 0
    while waiting and seen < NODES:
        node = waiting.pop()
        seen += 1
        yield node
        if kind_of(node) in (*REDUCING, *NEUTRAL):
            waiting += parents_of(node)


def kind_of(node: Any) -> str:
    """``NllLoss`` of ``NllLossBackward0``; empty for no node."""
    return "" if node is None else type(node).__name__.partition("Backward")[0]


def parents_of(node: Any) -> list[Any]:
    """What a node was made from, as far as gradients go there."""
    return [parent for parent, _ in node.next_functions if parent is not None]


def source_of(node: Any) -> Any:
    """What made a node's first input."""
    return node.next_functions[0][0] if node is not None and node.next_functions else None


def past_neutral(node: Any) -> Any:
    """The first node on the way back that does more than arrange its values anew."""
    for _ in range(8):
        if kind_of(node) not in NEUTRAL:
            break
        node = source_of(node)
    return node


def shape_of(node: Any) -> tuple[int, ...]:
    """Shape of what a node made; empty where torch does not tell."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(int(n) for n in metadata[0].shape) if metadata else ()


def signed(number: int) -> int:
    """Torch hands out negative numbers of a node as unsigned ones."""
    return number - 2**64 if number >= 2**63 else number
