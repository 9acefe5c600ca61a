"""How values are arranged on their way through a model: what the shapes in the graph of a loss show to be a mistake wherever it
stands. Views that read rows of the batch, or positions, as features; normalisations over one value; an answer that is read at
padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import largest, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import all_behind, kind_of, near, saved, shape_of, signed, source_of
from healthcheck.probes.labels import first_few, where_called
from healthcheck.probes.looks import GraphLooks

LOOKS = (2, 50)
"""Backward passes whose graph is looked at: each look walks through the whole graph once."""
LAYERS_MOST = 16
"""Layers and directions of a recurrent network: a first dimension that is larger is taken for something else."""
_VIEWS = ("View", "UnsafeView", "Reshape", "ReshapeAlias")
_BEFORE_PRODUCT = (*_VIEWS, "Expand", "Transpose", "Mul", "Div", "Clone")
"""What may lie between the view that makes heads and the product of queries with keys."""


class ArrangementProbe:
    """Looks through the graph of the loss for what its shapes show.

    *Mixed by a view*: ``h_n`` of a recurrent network, (layers, batch, features), viewed as (batch, layers * features), and
    heads of attention that are made of (batch, time, features) by one view, without a transpose. Memory is read on in its
    order, so that each row gets parts of other rows, or each position those of others. *Of one value*: group or layer
    normalisation over a single number, less its own mean: always 0, whatever came in. *Read at padding*: one position of each
    row is picked out of a sequence, the same for all rows, and in many rows the embedding read its ``padding_idx`` there.
    """

    name = "arrangement"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.mixed_by_view",
            "Views in the graph of the loss that read rows of the batch, or positions, as features of others.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
        Metric(
            "layers.norm_of_one",
            "Normalisations over a single value, whose result is the same whatever came in.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
        Metric(
            "output.at_padding",
            "Share of the rows whose answer is read at a position of padding.",
            "fraction",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "an embedding with padding_idx"),
        ),
    )

    def __init__(self) -> None:
        self._looks = GraphLooks(LOOKS)
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self._looks.due(event) or event.phase != "train":
            self.rests_until = self._looks.rests_until
            return ()
        nodes = all_behind(event.loss_graph)
        place = where_called(event, "backward")
        mixed = list(_mixing(nodes, _rows(event.loss_graph)))
        alone = list(_of_one(nodes))
        samples = [
            Sample(name, event.step, float(len(found)), detail=_facts(found, place) if found else None)
            for name, found in (("layers.mixed_by_view", mixed), ("layers.norm_of_one", alone))
        ]
        shares = list(_at_padding(nodes))
        if shares:
            value = largest([number(share) for share in shares])
            samples.append(Sample("output.at_padding", event.step, value, detail=lambda: place))
        return samples


def _facts(found: Sequence[str], place: dict[str, str]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"which": first_few(dict.fromkeys(found))} | place


def _sizes(node: Any) -> tuple[int, ...]:
    """Shape of what a view or a selection was made of."""
    return tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", ()))


def _rows(root: Any) -> set[int]:
    """Rows of the batch, by the targets of the losses."""
    targets = (saved(node, "target") for node in near(root))
    return {int(target.shape[0]) for target in targets if is_tensor(target) and target.dim()}


def _mixing(nodes: Sequence[Any], rows: set[int]) -> Iterator[str]:
    for node in nodes:
        kind = kind_of(node)
        if kind in _VIEWS:
            given, made = _sizes(node), shape_of(node)
            if len(given) == 3 and made[:1] == given[1:2] and _joins_layers(given, made) and given[1] in rows:
                yield f"a view of {given} as {made}: the batch is dimension 1; transpose(0, 1) first"
        elif kind == "Bmm" or kind.startswith("ScaledDotProduct"):
            for parent, _ in node.next_functions[:3]:
                yield from _heads_by_view(parent)


def _joins_layers(given: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether (layers, batch, features) became (batch, layers * features)."""
    layers, batch, features = given
    return made == (batch, layers * features) and 1 < layers <= LAYERS_MOST and layers != batch > 1


def _heads_by_view(node: Any) -> Iterator[str]:
    """Whether heads were made of (batch, time, features) by a view alone."""
    for _ in range(6):
        kind = kind_of(node)
        if kind not in _BEFORE_PRODUCT:
            return
        given, made = (_sizes(node), shape_of(node)) if kind in _VIEWS else ((), ())
        if len(given) == 3 and made:
            batch, time, features = given
            heads = features // made[-1] if made[-1] and features % made[-1] == 0 else 1
            joined = made == (batch * heads, time, made[-1])
            if heads > 1 and time > 1 and (joined or (made == (batch, heads, time, made[-1]) and heads != time)):
                yield (
                    f"{heads} heads by a view of {given} as {made}, which mixes positions:"
                    f" view({batch}, {time}, {heads}, {made[-1]}).transpose(1, 2)"
                )
                return
        node = source_of(node)


def _of_one(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        kind = kind_of(node)
        if kind == "NativeGroupNorm":
            channels, groups = int(node._saved_C), int(node._saved_group)
            if channels // groups * int(node._saved_HxW) == 1:
                yield f"group_norm of {shape_of(node)} in {groups} groups: one value each"
        elif kind == "NativeLayerNorm":
            over = tuple(int(n) for n in node._saved_normalized_shape)
            if all(n == 1 for n in over):
                yield f"layer_norm of {shape_of(node)} over the last {len(over)} of its dimensions: one value"


def _at_padding(nodes: Sequence[Any]) -> Iterator[Any]:
    """For each embedding with padding: the part of its rows that are padding where the one position is that is read."""
    lookups = [node for node in nodes if kind_of(node) == "Embedding" and signed(int(node._saved_padding_idx)) >= 0]
    if not lookups:
        return
    picked: dict[int, list[Any]] = {}
    for node in nodes:
        if kind_of(node) == "Select" and len(_sizes(node)) == 3:
            picked.setdefault(id(source_of(node)), []).append(node)
    for lookup in lookups:
        read: Any = saved(lookup, "indices")
        if not is_tensor(read) or read.dim() != 2:
            continue
        for selects in picked.values():
            # Of a loop over time each step reads one position, and its padding may well be left out later.
            if len(selects) != 1 or _is_lookup(source_of(selects[0])):
                continue
            node = selects[0]
            along = signed(int(node._saved_dim)) % 3
            if along > 1 or _sizes(node)[:2] != tuple(read.shape) or 1 in read.shape:
                continue
            tokens = read.detach().select(along, signed(int(node._saved_index)))
            yield (tokens == signed(int(lookup._saved_padding_idx))).float().mean()


def _is_lookup(node: Any) -> bool:
    """Whether what is read is the embedding itself: words, one by one."""
    for _ in range(8):
        kind = kind_of(node)
        if kind == "Embedding":
            return True
        if kind not in (*_VIEWS, "Transpose", "Permute", "Clone", "Add", "Mul", "NativeDropout"):
            return False
        node = source_of(node)
    return False
