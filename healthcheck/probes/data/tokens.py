"""Language models that are asked for what they have just read: targets out of place, attention that looks ahead.

Such a run looks better than it is: the loss falls fast and far, or the model learns to skip a word, and only what it
writes later shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.attention import Layer, layers_of
from healthcheck.probes.graph.looks import GraphLooks
from healthcheck.probes.graph.nodes import CROSS_ENTROPIES, kind_of, signed
from healthcheck.probes.graph.walk import all_behind, saved
from healthcheck.probes.transfer.late import Late, LateTable
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = (2, 10, 50)
"""Backward passes at which it is looked: each walks through the whole graph once, some milliseconds for a large model."""
MOST_AHEAD = 3
"""Positions by which targets are compared with what was read."""
SURE = 0.95
"""Part of the targets that must be the tokens that were read, so many positions on."""
FEW = 32
"""Targets below which nothing is said: with few of them, words are alike by chance."""

_AHEAD, _SEEN = "targets.ahead", "attention.ahead"


class TokenProbe:
    """Compares targets with the tokens that the model read, and looks at the masks of its attention.

    *Targets ahead*: by how many positions a target follows the token that it is to be told from. 1 is next-token
    prediction. 0 is told only where attention is causal: a model that sees everything may well be asked for what it sees
    (a tagger, an autoencoder). Of several losses (multi-token prediction) the nearest counts. *Attention ahead*: layers
    of a model of the next token in which a position attends to the very token that it is asked for. Only self-attention
    over these tokens counts, and only positions whose target counts: a prefix may be seen whole.

    Read are indices of ``nn.Embedding``, targets of the cross entropy, masks and weights of attention: what torch keeps
    for its backward pass. Nothing is computed anew, so what lies under activation checkpointing is judged only where
    ``is_causal`` tells it; what is compiled, and kernels of other packages, are not judged.
    """

    name = "tokens"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            _AHEAD,
            "Positions from a token read to the target told from it; 1 is the next token. Only where they are the same tokens.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
        Metric(
            _SEEN,
            "Layers of attention, in a model of the next token, in which a position sees the token that it is asked for.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        self._looks = GraphLooks(LOOKS)
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self._looks.due(event) or event.phase != "train":
            self.rests_until = self._looks.rests_until
            return ()
        return list(_samples(event.loss_graph, event.step))


@dataclass(slots=True)
class _Pair:
    """Tokens that were read, and the targets of one loss, both as rows of positions."""

    lookup: Any
    read: Any
    """Indices of an embedding: (rows, length)."""
    wanted: Any
    """(rows, at most length)."""
    counts: Any
    """Which targets count."""


def _samples(root: Any, step: int) -> Iterator[Sample]:
    nodes = all_behind(root)
    lookups = [node for node in nodes if kind_of(node) == "Embedding"]
    losses = [node for node in nodes if kind_of(node) in CROSS_ENTROPIES]
    pairs = [pair for loss in losses for lookup in lookups for pair in _pairs(loss, lookup)]
    if not pairs:
        return
    import torch

    layers = layers_of(nodes, lookups)
    causal = any(layer.causal for layer in layers)
    hits = torch.cat([_hits(pair) for pair in pairs])
    yield from _sample(_AHEAD, step, hits, lambda numbers: _ahead(numbers, causal=causal))
    flags = [
        part.to(hits.device) * (_hit(pair, 1) >= SURE)
        for pair in pairs
        for layer in layers
        if layer.reads(pair.lookup) and (part := _seen(layer, pair)) is not None
    ]
    if flags:
        yield from _sample(_SEEN, step, torch.cat([hits, torch.stack(flags)]), lambda n: _layers_ahead(n, len(hits)))


def _pairs(loss: Any, lookup: Any) -> Iterator[_Pair]:
    read, wanted = saved(lookup, "indices"), saved(loss, "target")
    if not is_tensor(read) or not is_tensor(wanted) or read.dim() > 2 or wanted.numel() < FEW:
        return
    if read.device != wanted.device:
        return
    read = read.detach().reshape(1, -1) if read.dim() < 2 else read.detach()
    left_out = signed(int(loss._saved_ignore_index))
    for rows_first in (True, False):
        tokens = read if rows_first else read.t()
        rows, length = tokens.shape
        width, rest = divmod(wanted.numel(), rows)
        if rest or not length - MOST_AHEAD <= width <= length:
            continue
        targets = wanted.detach().reshape(rows, width) if rows_first else wanted.detach().reshape(width, rows).t()
        yield _Pair(lookup, tokens, targets, (targets >= 0) & (targets != left_out))


def _hits(pair: _Pair) -> Any:
    import torch

    return torch.stack([_hit(pair, ahead) for ahead in range(MOST_AHEAD + 1)])


def _hit(pair: _Pair, ahead: int) -> Any:
    """Part of the targets that are the token so many positions on, as a 0-dim tensor; 0 if too few count."""
    width = min(pair.wanted.shape[1], pair.read.shape[1] - ahead)
    counts = pair.counts[:, :width]
    equal = (pair.wanted[:, :width] == pair.read[:, ahead : ahead + width]) & counts
    count = counts.sum()
    return (equal.sum() / count.clamp(min=1)) * (count >= FEW)


def _ahead(numbers: Sequence[float], *, causal: bool) -> float:
    """The nearest offset of any pair; NaN where targets are other things than the tokens read."""
    width = MOST_AHEAD + 1
    best = [max(numbers[offset::width]) for offset in range(width)]
    for offset in range(1, width):
        if best[offset] >= SURE:
            return float(offset)
    return 0.0 if causal and best[0] >= SURE else math.nan


def _seen(layer: Layer, pair: _Pair) -> Any:
    """Part of the positions whose target counts that see it; None if the layer does not attend over these tokens."""
    rows, length = pair.read.shape
    visible = layer.sees_next(rows, length)
    if visible is None:
        return None
    width = min(pair.wanted.shape[1], length - 1)
    counts = pair.counts[:, :width]
    return (visible.to(counts.device)[:, :width] & counts).sum() / counts.sum().clamp(min=1)


def _layers_ahead(numbers: Sequence[float], count: int) -> float:
    """How many layers see most targets; NaN where these are not the next tokens. ``count`` numbers are the offsets'."""
    known = _ahead(numbers[:count], causal=False) == 1
    return float(sum(part > 0.5 for part in numbers[count:])) if known else math.nan


def _sample(name: str, step: int, numbers: Any, compute: Callable[[Sequence[float]], float]) -> Iterator[Sample]:
    """Of numbers on the host at once, of those on a device when they have arrived."""
    if not on_host(numbers):
        yield Sample(name, step, Late(compute, LateTable(numbers.double())))
    elif not math.isnan(value := compute(numbers.tolist())):
        yield Sample(name, step, value)
