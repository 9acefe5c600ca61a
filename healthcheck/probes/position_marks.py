"""Attention over tokens whose positions it cannot tell apart, though something was added to mark them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.attention import LOOKS, SOFTMAXES
from healthcheck.probes.graph import NEUTRAL, all_behind, kind_of, parents_of, saved, shape_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe
from healthcheck.probes.padded_positions import padding_of

ROWS = 16
"""Rows of a batch that are compared at most."""
FEW = 16
"""Pairs of one token at two positions below which nothing is said."""
ALIKE = 1e-4
"""Distance of two vectors, as a part of the spread of all, up to which they are one and the same: rounding."""

_PRODUCTS = {"Bmm": (0, 1), "Baddbmm": (1, 2)}
"""Matrix products, and which of their inputs hold queries and keys."""
_SCALED = ("Mul", "Div", *NEUTRAL)
_ON_THE_WAY = (*NEUTRAL, "ReshapeAlias", "Mul", "Div", "Split", "SplitWithSizes", "UnsafeSplit", "Unbind", "Expand")
"""Between a projection and the product of queries and keys, where nothing marks positions there (as rotations do)."""
_PROJECTIONS = {"Addmm": (1, "mat1"), "Mm": (0, "self")}
NEAR = 200
"""Nodes between the embedding and the first attention layer that are followed."""


class PositionMarksProbe(GraphProbe):
    """Compares what attention reads at two positions of a row that hold the same token.

    A model of sequences adds to each token's vector one of its position. Where equal tokens of a row are one vector all the same,
    what was added does not differ along the row: the encoding of the batch's rows in place of the positions (``pe[:x.size(0)]`` where
    the batch comes first), frequencies by whole-number division, a table that is all zeros and not trained. Judged only where constants were
    added, since sets have no order and a learnt table may begin with zeros, and where nothing else tells positions apart: masks that differ
    from query to query, biases on scores, rotations of queries and keys.
    """

    name = "position-marks"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "attention.positions_alike",
            "Attention layers that read equal tokens of a row as one and the same vector, though something was added to tokens.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "attention over tokens"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        flags = [number(flag) for flag in positions_alike(event.loss_graph)]
        if not flags:
            return ()
        place = where_called(event, "backward")
        return (Sample("attention.positions_alike", event.step, calculate(_all_or_none, *flags), detail=lambda: place),)


def _all_or_none(*flags: float) -> float:
    """Where one layer tells positions apart, the model does."""
    return float(len(flags)) if all(flags) else 0.0


def positions_alike(root: Any) -> Iterator[Any]:
    """For each attention layer over tokens: 1 if equal tokens of a row are one vector to it, else 0, as a 0-dim tensor.

    Nothing where positions may be marked in a way that is not known, or where nothing was added to the tokens.
    """
    nodes = all_behind(root)
    lookups = [node for node in nodes if kind_of(node) == "Embedding"]
    found: list[Any] = []
    first = True
    for node in nodes if lookups else ():
        kind = kind_of(node)
        if not ((kind.startswith("ScaledDotProduct") and len(shape_of(node)) == 4) or _is_attention(node)):
            continue
        inputs = _read_by(node)
        if inputs is None:
            return
        for projection in inputs:
            if first and not _something_added(projection, lookups):
                return
            flag = _alike(projection, lookups)
            if flag is None:
                return
            found.append(flag)
        first = False
    yield from found[::2]


def _is_attention(node: Any) -> bool:
    shape = shape_of(node)
    return kind_of(node) in SOFTMAXES and len(shape) in (3, 4) and shape[-1] == shape[-2]


def _read_by(node: Any) -> tuple[Any, Any] | None:
    """The projections of queries and of keys of an attention layer; None where it masks or biases positions, or is not known."""
    if kind_of(node) in SOFTMAXES:
        product = node
        for _ in range(8):
            product = next(iter(parents_of(product)), None)
            if kind_of(product) in _PRODUCTS:
                break
            if kind_of(product) not in _SCALED or len(parents_of(product)) > 1:
                return None
        if kind_of(product) not in _PRODUCTS or (kind_of(product) == "Baddbmm" and product.next_functions[0][0]):
            return None
        places = _PRODUCTS[kind_of(product)]
        # What a Baddbmm adds to scores is not kept: a mask of padding, or of what comes later.
        if kind_of(product) == "Baddbmm" and float(getattr(product, "_saved_beta", 1)) != 0:
            return None
        queries, keys = (product.next_functions[place][0] for place in places)
    else:
        if bool(getattr(node, "_saved_is_causal", True)):
            return None
        for name in ("attn_mask", "attn_bias"):
            mask: Any = saved(node, name)
            # One that hides the same keys from each query may stay.
            if is_tensor(mask) and (mask.dim() < 2 or (mask.shape[-2] != 1 and mask.stride(-2) != 0)):
                return None
        queries, keys = node.next_functions[0][0], node.next_functions[1][0]
    projections = [_projection(one) for one in (queries, keys)]
    return None if None in projections else (projections[0], projections[1])


def _projection(node: Any) -> Any:
    for _ in range(24):
        kind = kind_of(node)
        if kind in _PROJECTIONS:
            return node
        parents = parents_of(node)
        if kind == "Add" and len(parents) == 2:
            parents = [parent for parent in parents if not _is_bias(parent)]
        elif kind not in _ON_THE_WAY:
            return None
        if len(parents) != 1:
            return None
        node = parents[0]
    return None


def _is_bias(node: Any) -> bool:
    variable: Any = getattr(node, "variable", None)
    return is_tensor(variable) and int(variable.dim()) < 2


def _something_added(projection: Any, lookups: Sequence[Any]) -> bool:
    """Whether constants were added to tokens on their way to the first layer, and nothing that is trained: a learnt table may
    begin with zeros."""
    before = all_behind(projection.next_functions[_PROJECTIONS[kind_of(projection)][0]][0])
    if len(before) > NEAR:
        return False
    known = {id(lookup) for lookup in lookups}
    reach: dict[int, frozenset[int]] = {}
    added = False
    for node in before:
        sides = [reach[id(parent)] if parent is not None else frozenset[int]() for parent, _ in node.next_functions]
        if kind_of(node) == "Add" and len(set(sides)) > 1 and not any(map(_is_bias, parents_of(node))):
            if len(parents_of(node)) > 1:
                return False
            added = True
        reach[id(node)] = frozenset((id(node),)) if id(node) in known else frozenset[int]().union(*sides)
    return added


def _alike(projection: Any, lookups: Sequence[Any]) -> Any:
    """Whether equal tokens of a row are one vector in what a projection reads, as a 0-dim tensor; None where that is not known."""
    import torch

    read: Any = saved(projection, _PROJECTIONS[kind_of(projection)][1])
    if not is_tensor(read) or read.dim() != 2 or not read.is_floating_point():
        return None
    for lookup in lookups:
        tokens: Any = saved(lookup, "indices")
        if not is_tensor(tokens) or tokens.dim() != 2 or tokens.numel() != len(read) or min(tokens.shape) < 3:
            continue
        tokens = tokens.detach()
        pads = padding_of(lookup, tokens)
        if pads is None or tokens.device != read.device:
            continue
        rows, length = tokens.shape
        values = read.detach().float()
        flags = [
            _equal_where_tokens_are(tokens[:ROWS], pads[:ROWS], vectors[:ROWS])
            for vectors in (values.view(rows, length, -1), values.view(length, rows, -1).transpose(0, 1))
        ]
        return torch.stack(flags).any().float()
    return None


def _equal_where_tokens_are(tokens: Any, pads: Any, vectors: Any) -> Any:
    """
    :param tokens: (rows, length), and which of them are padding.
    :param vectors: (rows, length, features); dropout may have set some of them to 0.
    """
    order = tokens.sort(dim=1, stable=True)
    sorted_vectors = vectors.gather(1, order.indices[..., None].expand_as(vectors))
    counts = ~pads.gather(1, order.indices)
    both = counts[:, 1:] & counts[:, :-1]
    same = (order.values[:, 1:] == order.values[:, :-1]) & both
    one, other = sorted_vectors[:, 1:], sorted_vectors[:, :-1]
    apart = ((one - other).abs() * ((one != 0) & (other != 0))).amax(-1)
    limit = ALIKE * vectors.std()
    varied = (
        order.values[:, 1:].where(same, order.values.max()).min()
        < order.values[:, 1:].where(same, order.values.min()).max()
    )
    alike = ((apart <= limit) | ~same).all() & (same.sum() >= FEW) & varied
    # Other tokens are other vectors: else all are one.
    return alike & ((apart > limit) | same | ~both).all()
