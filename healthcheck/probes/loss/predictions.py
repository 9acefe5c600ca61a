"""What the model answers, read from what torch keeps for the backward pass of the loss: the same for every input?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    NODES,
    REDUCING,
    kind_of,
    parents_of,
    past_neutral,
    source_of,
)
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, on_host, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

ROWS, COLUMNS = 64, 32
"""Rows and columns of a batch of answers that are looked at, at even distances."""
FEW = 8
"""Rows below which a batch says nothing of how answers differ."""
LARGE = 100
"""Size of targets from which on they are compared with the answers, and times of these that are out of reach."""
RARE = 0.1
"""What a label counts for where there are two classes."""

_PREDICTIONS, _EMBEDDINGS, _CLASS, _REACH = _KEYS = (
    "predictions.spread",
    "embeddings.spread",
    "targets.one_class",
    "targets.reach",
)
_ALL = frozenset(_KEYS)
_THROUGH = (
    *REDUCING, *NEUTRAL, "Max", "Min", "Amax", "Amin", "Relu", "ClampMin", "Clamp", "Softplus", "MaskedFill", "Where",
    "Exp", "Log", "Rsub",
)  # fmt: skip
_EMBEDDED = {
    "Cdist": "x1",
    "EuclideanDist": "x1",
    "LinalgVectorNorm": "self",
    "Norm": "self",
    "Div": "self",
}
"""Operations of losses on distances and angles, and where each keeps the vectors that it compares."""


class PredictionProbe:
    """Looks at the answers and targets that the loss was computed from, in the steps that a rule asks for.

    *Spread of predictions*: how far answers of one batch lie apart, in nats for classifiers and as a part of the
    targets' own spread for regressions; 0 is one answer for every input. Left out are losses whose targets do not
    differ. *Spread of embeddings*: of vectors whose distances or angles make up the loss, as a part of their length.
    *One class*: labels in a row that were of one and the same class, under a linear layer (those of contrastive losses
    are alike by design). *Reach*: size of the targets of a regression divided by that of the answers, where the
    targets are in their hundreds or more; else 0.

    No hook and no copy: torch has these tensors for its backward pass, and they are let go at once.
    """

    name = "predictions"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _PREDICTIONS,
            "How far the model's answers to one batch lie apart; 0 is one answer for every input.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss",),
        ),
        Metric(
            _EMBEDDINGS,
            "How far vectors that the loss compares lie apart, as a part of their length; 0 is one vector.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a loss that compares vectors"),
        ),
        Metric(
            _CLASS,
            f"Labels of a classifier in a row, of the batches looked at, that were all of one class; of two classes {RARE} each.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
        Metric(
            _REACH,
            f"Size of a regression's targets, where it is above {LARGE}, divided by that of the predictions; else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a regression"),
        ),
    )

    def __init__(self) -> None:
        self._step = 0
        self._class: int | None = None
        self._alike = 0.0
        """Labels in a row of the class ``_class``."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or step == self._step:
            return ()
        due = {*_ALL & demand.due_now}
        if not due:
            return ()
        self._step = step
        found: dict[str, list[Any]] = {}
        for key, value in self._looked_at(event.loss_graph, due):
            found.setdefault(key, []).append(value)
        return [Sample(key, step, scalar(_combined(key, values))) for key, values in found.items()]

    def _looked_at(self, root: Any, due: set[str]) -> Iterator[tuple[str, Any]]:
        for node in _parts(root):
            kind = kind_of(node)
            if kind in CROSS_ENTROPIES:
                yield from self._of_classes(node, due)
            elif kind in (*DISTANCES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"):
                yield from _of_numbers(node, kind, due)
            elif kind in _EMBEDDED and _EMBEDDINGS in due:
                vectors = saved(node, _EMBEDDED[kind])
                if is_tensor(vectors) and _are_vectors(node, vectors):
                    yield _EMBEDDINGS, _apart(_rows(vectors, 1), angles=kind == "Div")

    def _of_classes(self, node: Any, due: set[str]) -> Iterator[tuple[str, Any]]:
        softmax = past_neutral(source_of(node))
        labels: Any = saved(node, "target")
        answers = saved(softmax, "result") if kind_of(softmax) == "LogSoftmax" else None
        if answers is None or not is_tensor(labels) or labels.numel() < FEW:
            return
        differ = _differ(labels)
        if _PREDICTIONS in due:
            # What is masked, such as each row itself among the candidates of a contrastive loss, is minus infinity.
            rows = _rows(answers, int(softmax._saved_dim)).nan_to_num(0.0, 0.0, 0.0)
            if rows.shape[0] >= FEW:
                yield _PREDICTIONS, _where(differ, rows.std(0).max())
        if _CLASS in due and on_host(labels):
            known = None if bool(differ) else int(labels.reshape(-1)[0])
            linear = kind_of(past_neutral(source_of(softmax))) == "Addmm"
            # One of two classes may be rare: its absence says a tenth of what that of all others of ten does.
            weight = 1.0 if answers.shape[int(softmax._saved_dim)] > 2 else RARE
            more = 0.0 if known is None or known < 0 or not linear else weight * labels.numel()
            self._alike = self._alike + more if more and known == self._class else more
            self._class = known
            yield _CLASS, self._alike


def _are_vectors(node: Any, values: Any) -> bool:
    """Whether these are the rows of a batch; of a division, whether by their lengths; of a length, whether of differences.

    A length by itself compares nothing: that of a gradient in a penalty, of a capsule, of weights.
    """
    if values.dim() != 2 or values.shape[0] < FEW or values.shape[1] < 2:
        return False
    if kind_of(node) in ("LinalgVectorNorm", "Norm"):
        source = past_neutral(source_of(node))
        if kind_of(source) == "Add":  # a small number against a root of zero
            source = past_neutral(source_of(source))
        return kind_of(source) in ("Sub", "Rsub")
    lengths = saved(node, "other") if kind_of(node) == "Div" else None
    return lengths is None or tuple(lengths.shape) in ((values.shape[0], 1), tuple(values.shape))


def _of_numbers(node: Any, kind: str, due: set[str]) -> Iterator[tuple[str, Any]]:
    answers: Any = saved(node, "self")
    targets: Any = saved(node, "target")
    if not is_tensor(answers) or not is_tensor(targets) or answers.shape != targets.shape or not answers.dim():
        return
    if answers.shape[0] < FEW:
        return
    rows, wanted = _rows(answers, None), _rows(targets, None)
    apart, differ = rows.std(0).max(), wanted.std(0).max()
    size = wanted.square().mean().sqrt()
    reach = _where(size > LARGE, size / rows.square().mean().sqrt().clamp(min=1e-6), 0.0)
    if _PREDICTIONS in due:
        # Answers that have yet to get where the targets are lie close together on the way; the reach says it.
        told = (differ > 0) & (reach < LARGE)
        yield _PREDICTIONS, _where(told, _ratio(apart, differ) if kind in DISTANCES else apart)
    if _REACH in due and kind in DISTANCES:
        yield _REACH, reach


def _parts(root: Any) -> Iterator[Any]:
    """The loss and what it was computed from, up to the operations that keep answers or vectors."""
    waiting: list[Any] = [root]
    seen: dict[int, Any] = {}
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node  # kept: torch's wrapper of a node that nobody holds may come back under another id
        yield node
        if kind_of(node) in (*_THROUGH, *_EMBEDDED):
            waiting += parents_of(node)


def _rows(values: Any, classes: int | None) -> Any:
    """A few rows and columns of a batch, float32. ``classes``: the dimension that is one answer; all but the first if None."""
    values = values.detach()
    values = values.reshape(values.shape[0], -1) if classes is None else values.movedim(classes, -1).flatten(0, -2)
    rows, columns = (max(1, -(-n // most)) for n, most in zip(values.shape, (ROWS, COLUMNS), strict=True))
    return values[::rows, ::columns].float()


def _apart(vectors: Any, *, angles: bool) -> Any:
    """Circular variance (Mardia, 1972) of the directions; without ``angles`` the spread of the lengths, too."""
    import torch

    lengths = vectors.norm(dim=1)
    apart = 1 - (vectors / lengths.clamp(min=1e-30).unsqueeze(1)).mean(0).norm()
    if not angles:
        apart = torch.maximum(apart, _ratio(lengths.std(), lengths.mean()))
    return _where(lengths.max() > 0, apart)


def _differ(labels: Any) -> Any:
    low, high = labels.detach().aminmax()
    return low != high


def _ratio(part: Any, whole: Any) -> Any:
    return _where(whole > 0, part / whole.clamp(min=1e-30))


def _where(condition: Any, value: Any, other: float = 1.0) -> Any:
    import torch

    return torch.where(condition, value, torch.full_like(value, other))


def _combined(key: str, values: list[Any]) -> Any:
    """The worst of several parts of one loss: the smallest spread, the largest of the rest."""
    import torch

    if not is_tensor(values[0]):
        return max(values)
    values = [value.to(values[0].device) for value in values]
    return torch.stack(values).max() if key == _REACH else torch.stack(values).min()
