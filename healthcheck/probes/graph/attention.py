"""Layers of attention in the graph of a loss: over which tokens, and whether a position sees the one after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.probes.graph.nodes import NEUTRAL, kind_of, parents_of, shape_of
from healthcheck.probes.graph.walk import keeps, saved
from healthcheck.probes.values import is_tensor

OUT_OF_SIGHT = -1000.0
"""What is added to scores to hide a position is below this: minus infinity, the lowest number of a type, or -10000."""

_SOFTMAXES = ("Softmax", "SafeSoftmax", "_SafeSoftmax")
_SCORED = ("Add", "Sub", "Mul", "Div", "MaskedFill", "Where", *NEUTRAL)
"""What lies between the product of queries with keys and its softmax."""
_PRODUCTS = {"Bmm": 1, "Baddbmm": 2}
"""Matrix products, and which of their inputs holds the keys."""
_MASKS = ("attn_mask", "attn_bias")


@dataclass(slots=True)
class Layer:
    """One layer of attention whose masking is known."""

    lookups: frozenset[int]
    """Embeddings from which its keys are made, by ``id``."""
    causal: bool = False
    mask: Any = None
    """What is added to scores, or which of them count (boolean): (length, length), or with heads and rows before."""
    weights: Any = None
    """Attention weights, where no mask is known: (rows, heads, length, length), or rows and heads in one."""
    length: int = 0
    """Of queries and keys."""

    def reads(self, lookup: Any) -> bool:
        """Whether keys are made from this embedding."""
        return id(lookup) in self.lookups

    def sees_next(self, rows: int, length: int) -> Any:
        """Which positions see the one after them: boolean, (rows or 1, length - 1); None if it attends over others."""
        import torch

        if self.length != length:
            return None
        if self.causal:
            return torch.zeros(1, length - 1, dtype=torch.bool)
        matrix = self.weights if self.mask is None else self.mask
        if matrix is None:
            return torch.ones(1, length - 1, dtype=torch.bool)
        next_one = matrix.detach().diagonal(1, -2, -1)
        if self.weights is not None:
            next_one = next_one != 0
        elif next_one.dtype != torch.bool:
            next_one = next_one > OUT_OF_SIGHT
        if next_one.dim() == 2 and next_one.shape[0] % rows == 0:
            return next_one.unflatten(0, (rows, -1)).any(1)
        while next_one.dim() > 2:
            next_one = next_one.any(1)
        return (
            next_one
            if next_one.dim() == 2 and next_one.shape[0] in (1, rows)
            else next_one.reshape(-1, length - 1).any(0, keepdim=True)
        )


def layers_of(nodes: Sequence[Any], lookups: Sequence[Any]) -> list[Layer]:
    """All layers whose masking can be told.

    :param nodes: of the graph, each after those that it was made from.
    :param lookups: nodes of embeddings.
    """
    known = {id(lookup) for lookup in lookups}
    reach: dict[int, frozenset[int]] = {}
    nothing: frozenset[int] = frozenset()
    layers: list[Layer] = []
    for node in nodes:
        own = frozenset((id(node),)) if id(node) in known else nothing
        for parent, _ in node.next_functions:
            more = reach.get(id(parent), nothing) if parent is not None else nothing
            if more and not more <= own:
                own = own | more if own else more
        reach[id(node)] = own
        if own:
            layers += _layer(node, reach)
    return layers


def _layer(node: Any, reach: dict[int, frozenset[int]]) -> Iterator[Layer]:
    kind = kind_of(node)
    if kind.startswith("ScaledDotProduct") and hasattr(node, "_saved_is_causal"):
        key = node.next_functions[1][0]
        shape, keys = shape_of(node), shape_of(key)
        if key is None or len(shape) != 4 or len(keys) != 4 or shape[-2] != keys[-2]:
            return
        layer = Layer(reach[id(key)], causal=bool(node._saved_is_causal), length=shape[-2])
        if not layer.causal:
            masked = [keeps(node, name) for name in _MASKS if hasattr(node, f"_raw_saved_{name}")]
            if len(masked) != 1 or masked[0] is None:
                return
            if masked[0]:
                layer.mask = next(saved(node, name) for name in _MASKS if hasattr(node, f"_raw_saved_{name}"))
                if layer.mask is None or layer.mask.dim() < 2:
                    return
        yield layer
    elif kind in _SOFTMAXES:
        shape, keys = shape_of(node), _keys_of(node)
        if keys is None or len(shape) < 3 or shape[-1] != shape[-2]:
            return
        weights = saved(node, "result")
        if is_tensor(weights):
            yield Layer(reach[id(keys)], weights=weights, length=shape[-1])


def _keys_of(softmax: Any) -> Any:
    """What made the keys whose product with queries this is the softmax of; None if it is of something else."""
    node = softmax
    for _ in range(12):
        parents = parents_of(node)
        if not parents:
            return None
        node = parents[0]
        kind = kind_of(node)
        if kind in _PRODUCTS:
            return node.next_functions[_PRODUCTS[kind]][0]
        if kind not in _SCORED:
            return None
    return None
