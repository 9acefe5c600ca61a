"""Attention that looks at padding: rows that were filled up to one length, and no mask that hides what they were filled with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import all_behind, kind_of, saved
from healthcheck.probes.labels import where_called
from healthcheck.probes.language import LOOKS, Layer, layers_of
from healthcheck.probes.looks import GraphProbe
from healthcheck.probes.padded_positions import hidden_keys, padding_of

IN_FRONT = 8
"""Positions that a model may put in front of those that it reads: a class token, learnt prompts."""


class AttendedPaddingProbe(GraphProbe):
    """Counts attention layers that give weight to positions of padding.

    A position is padding where an embedding reads its ``padding_idx``, or the one token with which rows of different length end and
    which stands nowhere else. Layers that see no position behind their own are left out: at the end of a row nothing looks
    at its padding.
    """

    name = "attended-padding"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "attention.to_padding",
            "Attention layers, not causal, whose keys include padding that no mask hides.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "attention over tokens in rows of different length"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        flags = [number(flag) for flag in _looks_at_padding(event.loss_graph)]
        if not flags:
            return ()
        place = where_called(event, "backward")
        value = calculate(_added, *flags)
        return (Sample("attention.to_padding", event.step, value, detail=lambda: place),)


def _added(*flags: float) -> float:
    return float(sum(flags))


def _looks_at_padding(root: Any) -> Iterator[Any]:
    """For each layer that reads rows with padding: 1 if it sees that, else 0, as a 0-dim tensor."""
    nodes = all_behind(root)
    lookups = [node for node in nodes if kind_of(node) == "Embedding"]
    if not lookups:
        return
    layers = [layer for layer in layers_of(nodes, lookups) if not layer.causal]
    for lookup in lookups if layers else ():
        read: Any = saved(lookup, "indices")
        if not is_tensor(read) or read.dim() != 2 or min(read.shape) < 2:
            continue
        pads = padding_of(lookup, read.detach())
        if pads is None:
            continue
        for layer in layers:
            if layer.reads(lookup) and 0 <= layer.length - read.shape[1] <= IN_FRONT:
                seen = _seen(layer, pads)
                if seen is not None:
                    yield seen.float()


def _seen(layer: Layer, pads: Any) -> Any:
    """Whether most of the padding is seen by some query: a 0-dim boolean tensor; None where masks do not differ by row."""
    matrix = layer.mask if layer.weights is None else layer.weights
    if matrix is None:
        return pads.any()
    rows, length = pads.shape
    hidden = hidden_keys(layer.mask, layer.weights, rows, layer.length)
    if hidden is None:
        return None
    # One that is causal by what it hides.
    if layer.weights is not None:
        ahead = (matrix.detach() != 0).triu(1).any()
    else:
        ahead = (matrix.detach() if str(matrix.dtype) == "torch.bool" else matrix.detach() > -1e4).triu(1).any()
    return ahead & ((pads & ~hidden[:, -length:].to(pads.device)).sum() * 2 > pads.sum())
