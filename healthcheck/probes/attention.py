"""Attention by hand that is not what it looks like: masks that leave weight on what they should hide, weights that add up to 1
over the wrong dimension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import NEUTRAL, all_behind, dimension, kind_of, past_neutral, saved, shape_of, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 10, 50)
"""Backward passes whose graph is looked at: each look walks through the whole graph once."""
WEIGHT = 1e-3
"""Weight of a hidden position from which on it is seen."""
SOFTMAXES = ("Softmax", "SafeSoftmax", "_SafeSoftmax")
_BETWEEN = (*NEUTRAL, "Expand", "NativeDropout", "Mul")


class AttentionProbe(GraphProbe):
    """Reads the masks and the weights of attention that is written with ``softmax``.

    *Unmasked*: what ``masked_fill`` has hidden gets weight from the softmax behind it, in rows in which something else is
    to be seen: the value filled in is no large negative number. *Over queries*: a square matrix of products of queries and keys
    whose softmax runs over the queries, while the values are added up over the keys.
    """

    name = "attention"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "attention.unmasked",
            "Softmax layers that give weight to positions that a masked_fill in front of them has hidden.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "attention by hand"),
        ),
        Metric(
            "attention.over_queries",
            "Attention layers whose weights add up to 1 over the queries, though values are added up over the keys.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "attention by hand"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        nodes = all_behind(event.loss_graph)
        place = where_called(event, "backward")
        samples = []
        flags = [
            number(flag) for node in nodes if kind_of(node) in SOFTMAXES if (flag := _sees_hidden(node)) is not None
        ]
        if flags:
            samples.append(Sample("attention.unmasked", event.step, calculate(_added, *flags), detail=lambda: place))
        shapes = [shape for node in nodes if kind_of(node) == "Bmm" if (shape := _adds_up_keys(node)) is not None]
        if shapes:
            wrong = [shape for shape, over in shapes if over]
            facts: Mapping[str, Any] = {"shape of the weights": str(wrong[0])} | place if wrong else {}
            detail = (lambda: facts) if wrong else None
            samples.append(Sample("attention.over_queries", event.step, float(len(wrong)), detail=detail))
        return samples


def _added(*flags: float) -> float:
    return float(sum(flags))


def _sees_hidden(softmax: Any) -> Any:
    """1 where positions that were filled in have weight beside others that were not, as a 0-dim tensor; None without a mask."""
    filled, result = source_of(softmax), saved(softmax, "result")
    mask: Any = saved(filled, "mask") if kind_of(filled) == "MaskedFill" else None
    if not is_tensor(mask) or not is_tensor(result) or result.dim() < 2 or mask.device != result.device:
        return None
    result = result.detach()
    try:
        hidden = mask.detach().expand_as(result)
    except RuntimeError:
        return None
    along = dimension(softmax, result.dim())
    beside = (~hidden).any(along, keepdim=True)
    weight = (result * (hidden & beside)).amax()
    return (weight > WEIGHT).float()


def _adds_up_keys(product: Any) -> tuple[tuple[int, ...], bool] | None:
    """Of weights times values: the shape of the weights, and whether their softmax ran over the queries instead of the keys."""
    node = source_of(product)
    turned = False
    for _ in range(10):
        kind = kind_of(node)
        if kind in SOFTMAXES:
            break
        if kind not in _BETWEEN:
            return None
        if kind == "Transpose":
            turned = not turned
        elif kind == "Permute":
            return None
        node = source_of(node)
    shape = shape_of(node)
    if kind_of(node) not in SOFTMAXES or turned or len(shape) not in (3, 4) or shape[-1] != shape[-2] or shape[-1] < 3:
        return None
    scores = source_of(node)
    for _ in range(6):
        if kind_of(scores) not in ("Div", "Mul", "MaskedFill", "Add", "Where", *NEUTRAL):
            break
        scores = source_of(scores) or (scores.next_functions[1][0] if len(scores.next_functions) > 1 else None)
    if kind_of(past_neutral(scores)) != "Bmm":
        return None
    return shape, dimension(node, len(shape)) == len(shape) - 2
