"""Language models: targets out of place, attention that looks ahead, padding that counts, ends of texts that never do.

Such a run looks better than it is: the loss falls fast and far, or the model learns to skip a word, and only what it
writes later shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, numbers
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.batches import IGNORE
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    NEUTRAL,
    all_behind,
    keeps,
    kind_of,
    log_probabilities,
    near,
    parents_of,
    saved,
    shape_of,
    signed,
)
from healthcheck.probes.looks import GraphProbe, SeenModules

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
    """All layers of which it can be seen what they mask.

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
        # With an explicit mask, that decides; without any, everything is seen.
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


LOOKS = (2, 10, 50)
"""Backward passes whose graph is looked at: each look walks through the whole graph once, some milliseconds for a large model."""
MOST_AHEAD = 3
"""Positions by which targets are compared with what was read."""
SURE = 0.95
"""Part of the targets that must be the tokens that were read, so many positions on."""
FEW = 32
"""Targets below which nothing is reported: with few of them, tokens agree by chance."""

_AHEAD, _SEEN = "targets.ahead", "attention.ahead"


class TokenProbe(GraphProbe):
    """Compares targets with the tokens that the model read, and looks at the masks of its attention.

    *Targets ahead*: by how many positions a target follows the token that it is predicted from. 1 is next-token
    prediction. 0 is reported only where attention is causal, or where the model reads another sequence beside this one, as
    a translator does: a model that sees everything may well be asked for what it sees (a tagger, an autoencoder). Of several losses (multi-token prediction) the nearest counts. *Attention ahead*:
    layers of a model of the next token in which a position attends to the very token that it has to predict. Only
    self-attention over these tokens counts, and only positions whose target counts: a prefix may be seen whole.

    Everything is read from what torch keeps for its backward pass: indices of ``nn.Embedding``, targets of the cross
    entropy, masks and weights of attention. Nothing is computed again, so layers under activation checkpointing are
    judged only where ``is_causal`` decides; compiled code and kernels of other packages are not judged.
    """

    name = "tokens"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            _AHEAD,
            "How many positions a target lies ahead of the token it is predicted from; 1 is next-token prediction. Only where targets are input tokens.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a language model"),
        ),
        Metric(
            _SEEN,
            "Attention layers of a next-token model in which a position sees the token that it has to predict.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a language model"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
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
    causal = any(layer.causal for layer in layers) or any(_translates(pair, lookups) for pair in pairs)
    hits = torch.cat([_hits(pair) for pair in pairs])
    found = [(_AHEAD, calculate(partial(_ahead, causal=causal), numbers(hits)))]
    flags = [
        part.to(hits.device) * (_hit(pair, 1) >= SURE)
        for pair in pairs
        for layer in layers
        if layer.reads(pair.lookup) and (part := _seen(layer, pair)) is not None
    ]
    if flags:
        both = numbers(torch.cat([hits, torch.stack(flags)]))
        found.append((_SEEN, calculate(partial(_layers_ahead, len(hits)), both)))
    yield from (Sample(name, step, value) for name, value in found if value is not None)


def _pairs(loss: Any, lookup: Any) -> Iterator[_Pair]:
    read, wanted = saved(lookup, "indices"), saved(loss, "target")
    if not is_tensor(read) or not is_tensor(wanted) or read.dim() > 2 or wanted.numel() < FEW:
        return
    if read.device != wanted.device:
        return
    read = read.detach().reshape(1, -1) if read.dim() < 2 else read.detach()
    left_out = signed(int(loss._saved_ignore_index))
    # Batches lie as (rows, length) or as (length, rows); the loss has flattened them either way.
    for rows_first in (True, False):
        tokens = read if rows_first else read.t()
        rows, length = tokens.shape
        # Targets may be fewer than tokens: those at the end have no next one.
        width, rest = divmod(wanted.numel(), rows)
        if rest or not length - MOST_AHEAD <= width <= length:
            continue
        targets = wanted.detach().reshape(rows, width) if rows_first else wanted.detach().reshape(width, rows).t()
        yield _Pair(lookup, tokens, targets, (targets >= 0) & (targets != left_out))


def _translates(pair: _Pair, lookups: Sequence[Any]) -> bool:
    """Whether another sequence is read for each row, so that this one is put out for it: of tokens, not of positions or
    types. Read on the host only."""
    for lookup in lookups:
        other: Any = None if lookup is pair.lookup else saved(lookup, "indices")
        if not is_tensor(other) or not on_host(other) or other.dim() != 2 or pair.read.shape[0] not in other.shape:
            continue
        same = other.shape == pair.read.shape and bool((other == pair.read).all())
        varied = bool((other != other[:1]).any()) and bool((other != other[:, :1]).any())
        if varied and not same and int(other.max()) >= FEW_TOKENS and _far(other, pair.read):
            return True
    return False


def _far(one: Any, other: Any) -> bool:
    """Whether two sequences are not the same one but for a few positions or an offset."""
    if one.shape != other.shape:
        return True
    return bool((one[:, 1:] == other[:, :-1]).float().mean() < 0.5) and bool((one == other).float().mean() < 0.5)


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


def _ahead(hits: Sequence[float], *, causal: bool) -> float | None:
    """The nearest offset of any pair; None where targets are other things than the tokens read."""
    width = MOST_AHEAD + 1
    best = [max(hits[offset::width]) for offset in range(width)]
    for offset in range(1, width):
        if best[offset] >= SURE:
            return float(offset)
    return 0.0 if causal and best[0] >= SURE else None


def _seen(layer: Layer, pair: _Pair) -> Any:
    """Part of the positions whose target counts that see it; None if the layer does not attend over these tokens."""
    rows, length = pair.read.shape
    visible = layer.sees_next(rows, length)
    if visible is None:
        return None
    width = min(pair.wanted.shape[1], length - 1)
    counts = pair.counts[:, :width]
    return (visible.to(counts.device)[:, :width] & counts).sum() / counts.sum().clamp(min=1)


def _layers_ahead(count: int, found: Sequence[float]) -> float | None:
    """How many layers see most targets; None where these are not the next tokens. The first ``count`` numbers are those
    of the offsets, the others one for each layer."""
    known = _ahead(found[:count], causal=False) == 1
    return float(sum(part > 0.5 for part in found[count:])) if known else None


FEW_TOKENS = 4
"""Types of a token are fewer."""

_PADDING, _ENDS = "targets.padding", "targets.ends_masked"
FEW_TARGETS = 64
"""Targets below which nothing is reported."""


class PaddingProbe:
    """Compares targets with the padding and the end of text that the model knows.

    *Padding*: part of the targets of a cross entropy that are padding and follow padding, so that the end-of-text token
    of a text, which may be the same, is none. Which token is padding is taken from an ``nn.Embedding(padding_idx=...)``
    with as many rows as there are classes, or from the model's ``config``. A loss that ignores it, weighs it with 0, or is reduced by the
    script itself (which may mask it) has none.

    *Ends masked*: part of the end-of-text tokens of a batch, where the attention mask shows them, whose label is
    -100. It is all of them where a collator masks padding by its token, and the padding token is the end-of-text token.
    Batches on a device are not read.
    """

    name = "padding"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _PADDING,
            "Share of the targets that are padding after padding and count in the loss.",
            "fraction",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a language model", "padding"),
        ),
        Metric(
            _ENDS,
            f"Part of the batch's end-of-text tokens that are labelled {IGNORE}, and so are never trained on.",
            "fraction",
            cost=Cost.HOST,
            needs=("a language model", "batches", "tokens that end a text"),
        ),
    )

    def __init__(self) -> None:
        self._modules = SeenModules()
        self._padding: dict[int, int] = {}
        """Padding token by the number of tokens."""
        self._ends: set[int] = set()
        self._step = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.phase != "train" or event.step == self._step:
            return ()
        padding, ends = demand.due(_PADDING, event.step), demand.due(_ENDS, event.step)
        if not padding and not ends:
            return ()
        self._step = event.step
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._padding, self._ends = dict(_padding_tokens(modules)), set(_end_tokens(modules))
        found = []
        if padding and self._padding and event.loss_graph is not None:
            shares = [share for node in near(event.loss_graph) for share in self._share(node)]
            found += [Sample(_PADDING, event.step, number(share)) for share in shares[:1]]
        if ends and self._ends and isinstance(event.batch, Mapping):
            found += [Sample(_ENDS, event.step, share) for share in _masked_ends(event.batch, self._ends)]
        return found

    def _share(self, node: Any) -> Iterator[Any]:
        if kind_of(node) not in CROSS_ENTROPIES or not int(node._saved_reduction):
            return
        targets: Any = saved(node, "target")
        answers = log_probabilities(node)
        if answers is None or not is_tensor(targets) or targets.numel() < FEW_TARGETS:
            return
        token = self._padding.get(int(answers.shape[-1]))
        ignored = signed(int(node._saved_ignore_index))
        if token is None or token == ignored:
            return
        flat = targets.detach().reshape(-1)
        pads = flat == token
        # Padding behind padding: the first one may be an end of text that is meant to be learnt.
        share = (pads[1:] & pads[:-1]).sum() / (flat != ignored).sum().clamp(min=1)
        weights: Any = saved(node, "weight")
        yield share if weights is None else share * (weights.detach()[token] != 0)


def _padding_tokens(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, int]]:
    from torch import nn

    for _, module in modules:
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            yield module.num_embeddings, module.padding_idx
        config = getattr(module, "config", None)
        token, size = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
        if isinstance(token, int) and isinstance(size, int) and token != getattr(config, "eos_token_id", None):
            yield size, token


def _end_tokens(modules: Iterable[tuple[str, Any]]) -> Iterator[int]:
    for _, module in modules:
        ends = getattr(getattr(module, "config", None), "eos_token_id", None)
        yield from (end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))


def _masked_ends(batch: Mapping[str, Any], ends: set[int]) -> Iterator[float]:
    """The first token of a text is no target of its own."""
    known: list[Any] = [batch.get(key) for key in ("input_ids", "labels", "attention_mask")]
    if not all(is_tensor(t) and on_host(t) and t.dim() == 2 for t in known):
        return
    tokens, labels, mask = known
    if not tokens.shape == labels.shape == mask.shape:
        return
    here = sum((tokens[:, 1:] == end) for end in ends) * (mask[:, 1:] != 0)
    count = int(here.sum())
    if count:
        yield int((here * (labels[:, 1:] == IGNORE)).sum()) / count
