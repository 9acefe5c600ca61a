"""Padding that counts as a target, and ends of texts that never do: what a language model is not meant to learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.data.batches import IGNORE
from healthcheck.probes.graph.nodes import CROSS_ENTROPIES, kind_of, near, past_neutral, signed, source_of
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.values import is_tensor, on_host, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

_PADDING, _ENDS = "targets.padding", "targets.ends_masked"
FEW = 64
"""Targets below which nothing is said."""


class PaddingProbe:
    """Compares targets with the padding and the end of text that the model knows.

    *Padding*: part of the targets of a cross entropy that are padding and follow padding, so that the end-of-text token
    of a text, which may be the same, is none. What padding is says an ``nn.Embedding(padding_idx=...)`` of as many rows
    as there are classes, or the model's ``config``. A loss that ignores it, weighs it with 0, or is reduced by the
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
            "Part of the targets that are padding behind padding, and count in the loss.",
            "fraction",
            cost=Cost.DEVICE,
            needs=("the graph of the loss",),
        ),
        Metric(
            _ENDS,
            f"Part of the batch's end-of-text tokens that are labelled {IGNORE}, and so are never learnt.",
            "fraction",
            cost=Cost.HOST,
            needs=("batches",),
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
            found += [Sample(_PADDING, event.step, scalar(share)) for share in shares[:1]]
        if ends and self._ends and isinstance(event.batch, Mapping):
            found += [Sample(_ENDS, event.step, share) for share in _masked_ends(event.batch, self._ends)]
        return found

    def _share(self, node: Any) -> Iterator[Any]:
        if kind_of(node) not in CROSS_ENTROPIES or not int(node._saved_reduction):
            return
        softmax = past_neutral(source_of(node))
        targets: Any = saved(node, "target")
        answers = saved(softmax, "result") if kind_of(softmax) == "LogSoftmax" else None
        if answers is None or not is_tensor(targets) or targets.numel() < FEW:
            return
        token = self._padding.get(int(answers.shape[int(softmax._saved_dim)]))
        ignored = signed(int(node._saved_ignore_index))
        if token is None or token == ignored:
            return
        flat = targets.detach().reshape(-1)
        pads = flat == token
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
