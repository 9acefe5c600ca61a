"""How values are arranged on their way through a model: what the shapes in the graph of a loss show to be a mistake wherever it
stands. Views that read rows of the batch, or positions, as features; normalisations over one value; an answer that is read at
padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import largest, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    all_behind,
    kind_of,
    near,
    saved,
    shape_of,
    signed,
    source_of,
)
from healthcheck.probes.labels import first_few, where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 50)
"""Backward passes whose graph is looked at: each look walks through the whole graph once."""
LAYERS_MOST = 16
"""Layers and directions of a recurrent network: a first dimension that is larger is taken for something else."""
_VIEWS = ("View", "UnsafeView", "Reshape", "ReshapeAlias")
_BEFORE_PRODUCT = (*_VIEWS, "Expand", "Transpose", "Mul", "Div", "Clone")
"""What may lie between the view that makes heads and the product of queries with keys."""


class ArrangementProbe(GraphProbe):
    """Looks through the graph of the loss for what its shapes show.

    *Mixed by a view*: (batch, features, positions) viewed as (batch, positions, features), ``h_n`` of a recurrent network, (layers, batch, features), viewed as (batch, layers * features), and
    heads of attention that are made of (batch, time, features) by one view, without a transpose. Memory is read on in its
    order, so that each row gets parts of other rows, or each position those of others. *Of one value*: group or layer
    normalisation over a single number, less its own mean: always 0, whatever came in. *Read at padding*: one position of each
    row is picked out of a sequence, the same for all rows, and in many rows the embedding read its ``padding_idx`` there.
    """

    name = "arrangement"
    looks_at = LOOKS
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
        Metric(
            "tokens.padding_inside",
            "Share of an embedding's padding_idx that stands between other tokens, where the loss predicts it, too.",
            "fraction",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "an embedding with padding_idx"),
        ),
        Metric(
            "layers.all_linear",
            "Linear layers of a model that is nothing but linear layers, one behind the other, some wider than what they are given.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._linear_said = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
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
        inside = list(_padding_inside(nodes, event.loss_graph))
        if inside:
            value = largest([number(share) for share in inside])
            samples.append(Sample("tokens.padding_inside", event.step, value, detail=lambda: place))
        widths = _all_linear(nodes)
        if widths or not self._linear_said:
            self._linear_said = True
            which = {"which": " -> ".join(map(str, widths))}
            samples.append(
                Sample("layers.all_linear", event.step, float(max(0, len(widths) - 1)), detail=lambda: which | place)
            )
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
            elif _swaps_by_view(given, made) and (not rows or given[0] in rows):
                yield f"a view of {given} as {made} is no transpose: it mixes features with positions; transpose(1, 2)"
        elif kind == "Bmm" or kind.startswith("ScaledDotProduct"):
            for parent, _ in node.next_functions[:3]:
                yield from _heads_by_view(parent)


def _joins_layers(given: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether (layers, batch, features) became (batch, layers * features)."""
    layers, batch, features = given
    return made == (batch, layers * features) and 1 < layers <= LAYERS_MOST and layers != batch > 1


def _swaps_by_view(given: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether (batch, features, positions) was read as (batch, positions, features), positions of one dimension or of several."""
    if len(made) != 3 or len(given) < 3 or given[0] != made[0] or min(made) < 2:
        return False
    positions = math.prod(given[2:])
    before = math.prod(given[1:-1])
    # Channels in front, as of a picture that becomes a row of patches; or behind.
    return given[1] != positions and (
        made[1:] == (positions, given[1])
        or (len(given) == 3 and before != given[-1] and made[1:] == (given[-1], before))
    )


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


LEAST_PADDING = 5
"""Times that ``padding_idx`` must stand in a batch to be judged."""


def _padding_inside(nodes: Sequence[Any], root: Any) -> Iterator[Any]:
    """For each embedding with padding: which part of it stands between words, as a word does, if it is a target of the loss as well.

    Along both dimensions: where the batch comes second, rows of other lengths stand beside each other.
    """
    for lookup in nodes:
        if kind_of(lookup) != "Embedding" or signed(int(lookup._saved_padding_idx)) < 0:
            continue
        padding = signed(int(lookup._saved_padding_idx))
        read: Any = saved(lookup, "indices")
        if not is_tensor(read) or read.dim() != 2 or min(read.shape) < 3:
            continue
        targets: Any = None
        for loss in near(root):
            if kind_of(loss) in CROSS_ENTROPIES and signed(int(loss._saved_ignore_index)) != padding:
                classes = shape_of(source_of(loss))
                if len(classes) > 1 and classes[1] == int(lookup._saved_weight_sym_argsize_0):
                    targets = saved(loss, "target")
        if not is_tensor(targets) or targets.is_floating_point():
            continue
        there = read.detach() == padding
        # Of padding at the end none has a word behind it, of padding in front none has one before it.
        beside = [_between(turned) for turned in (there, there.T)]
        yield beside[0].minimum(beside[1]) * (there.sum() >= LEAST_PADDING) * (targets == padding).any()


def _between(there: Any) -> Any:
    """Which part of the padding within rows has something else behind it, and before it: the smaller of both."""
    inner = there[:, 1:-1]
    count = inner.sum().clamp(min=1)
    return ((inner & ~there[:, 2:]).sum() / count).minimum((inner & ~there[:, :-2]).sum() / count)


def _all_linear(nodes: Sequence[Any]) -> list[int]:
    """Widths of the layers of a model that is linear as a whole, from its input on; empty for any other.

    Narrow layers between wide ones are a factorisation and may be meant. A single hidden layer counts only if it is wider than the
    input and the output: who lays a classifier over a projection makes it narrower.
    """
    heads = [node for node in nodes if kind_of(node) in ("Addmm", "Mm")]
    if len(heads) < 2 or any(kind_of(node) in _CURVED for node in nodes[: nodes.index(heads[-1])]):
        return []
    widths: list[int] = []
    node = heads[-1]
    for _ in range(64):
        kind = kind_of(node)
        if kind in ("Addmm", "Mm"):
            rows, given = ("mat1", 1) if kind == "Addmm" else ("self", 0)
            read: Any = saved(node, rows)
            if not is_tensor(read) or read.dim() != 2 or not _is_weight(node, kind):
                return []
            widths = [*(widths or [shape_of(node)[-1]]), int(read.shape[1])]
            node = node.next_functions[given][0]
        elif node is None:
            break
        elif kind in ("NativeDropout", "View", "UnsafeView", "Reshape", "Clone", "ToCopy", "Squeeze", "Unsqueeze"):
            node = source_of(node)
        elif kind == "Mul" and node.next_functions[1:] and node.next_functions[1][0] is None:
            node = source_of(node)  # dropout: a product with a mask
        else:
            return []
    widths.reverse()
    inner = widths[1:-1]
    if len(widths) - 1 != len(heads) or not inner or min(inner) < min(widths[0], widths[-1]):
        return []
    wide = max(inner) > max(widths[0], widths[-1])
    return widths if wide or len(inner) > 1 else []


_CURVED = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Gelu",
    "Silu",
    "Elu",
    "LeakyRelu",
    "Softplus",
    "Hardswish",
    "Mish",
    "PreluKernel",
)


def _is_weight(node: Any, kind: str) -> bool:
    """Whether a product is one with a parameter, as a linear layer makes it."""
    weight = node.next_functions[2 if kind == "Addmm" else 1][0]
    return kind_of(weight) == "T" and kind_of(source_of(weight)) == "AccumulateGrad"


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
