"""Values that a loss was not made for: targets of another kind, logits for log probabilities, weights of classes that favour
the frequent ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, numbers, value_of, values_of
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    REDUCING,
    kind_of,
    made_of,
    near,
    parents_of,
    past_neutral,
    saved,
    shape_of,
    source_of,
)
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import CloserLooks, GraphProbe, spread_over_ranks

LOOKS = (2, 50, 200, 350, 1000, 3000)
"""Backward passes whose graph is looked at: a few dozen nodes and a few reductions each time."""
MARK = "healthcheck"
"""Where the graph keeps which function of torch made a loss (:mod:`healthcheck.instrument.heldout`)."""
_UNIT = 0.05
"""How far the logarithm of a sum of probabilities may be from 0."""

_ERRORS = (*CROSS_ENTROPIES, *DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_TO_A_RATIO = (*REDUCING, *NEUTRAL, "Minimum", "Maximum", "Clamp", "Where")

Flag = tuple[Any, str]
"""A 0-dim boolean tensor that says whether something is wrong, and what, in words."""


class LossValueProbe(GraphProbe):
    """Looks whether a loss gets the kind of values that its formula takes.

    Only what its formula rules out: log probabilities that do not add up to 1 (``ctc_loss``), a divergence from numbers below 0
    (``kl_div``), several labels of a row where the formula has one (``cross_entropy``), labels other than 1 and -1
    (``cosine_embedding_loss`` and its like), a ratio of two results of one and the same pass. Reductions stay on the device.
    """

    name = "loss-values"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.unfit",
            "Inputs of a loss that its formula does not allow, at the 2nd and the 50th backward pass and at a few later ones.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        flags = [(number(flag.float()), words) for flag, words in unfit(event.loss_graph)]
        if not flags:
            return (Sample("loss.unfit", event.step, 0.0),)
        place = where_called(event, "backward")

        def facts() -> Mapping[str, Any]:
            return {"which": "; ".join(dict.fromkeys(words for flag, words in flags if value_of(flag)))} | place

        total = calculate(_added, *(flag for flag, _ in flags))
        return (Sample("loss.unfit", event.step, total, detail=facts),)


def _added(*flags: float) -> float:
    return float(sum(flags))


def unfit(root: Any) -> Iterator[Flag]:
    """What may be wrong with the values behind a loss. Reads nothing on the host."""
    for node in near(root):
        kind = kind_of(node)
        if kind == "CtcLoss":
            yield from _of_ctc(node)
        elif kind == "Sub":
            yield from _of_divergence(node)
        elif kind == "BinaryCrossEntropy":
            yield from _of_labels_that_compete(node)
        name = _made_by(node)
        if name == "cross_entropy":
            yield from _of_several_labels(node)
        elif name in ("cosine_embedding_loss", "hinge_embedding_loss"):
            yield from _of_two_sides(node, name)
    for node, kind in made_of(root, _TO_A_RATIO):
        if kind == "Mul":
            yield from _of_ratio(node)
            yield from _of_learnt_weight(node)


def _made_by(node: Any) -> str:
    mark = node.metadata.get(MARK) if hasattr(node, "metadata") else None
    return mark[0] if mark else ""


def _of_ctc(node: Any) -> Iterator[Flag]:
    given: Any = saved(node, "log_probs")
    if is_tensor(given) and given.dim() >= 2 and given.numel():
        sums = given.detach().float().logsumexp(-1).abs()
        yield (
            (sums > _UNIT).float().mean() > 0.5,
            "ctc_loss of values that are no log probabilities: log_softmax over the classes belongs in front of it",
        )


def _of_divergence(node: Any) -> Iterator[Flag]:
    """``t * log t - t * input``, torch's ``kl_div``: of a target t without gradients the first term is not in the graph."""
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or kind_of(parents[1]) != "Mul" or kind_of(parents[0]) not in ("", "Xlogy"):
        return
    inner = [parent for parent, _ in parents[1].next_functions]
    if parents[0] is None:
        if inner.count(None) != 1 or kind_of(past_neutral(inner[0] or inner[1])) != "LogSoftmax":
            return
        target: Any = saved(parents[1], "self" if inner[0] is None else "other")
    else:
        target = saved(parents[0], "self")
    if is_tensor(target) and target.numel() > 1:
        values = target.detach()
        yield (
            (values <= 0).all() & (values < 0).any(),
            "kl_div from values below 0: kl_div(log of the prediction, target), in this order; log_target=True for a target in"
            " logarithms",
        )


def _of_labels_that_compete(node: Any) -> Iterator[Flag]:
    """A binary cross entropy of a softmax, whose rows add up to 1, with rows of several labels."""
    made, target = past_neutral(source_of(node)), saved(node, "target")
    if kind_of(made) == "Softmax" and is_tensor(target) and target.dim() == 2 and shape_of(made) == tuple(target.shape):
        yield (
            (target.detach().sum(1) > 1).any(),
            "binary_cross_entropy of a softmax with several labels in a row: its outputs add up to 1; use sigmoid",
        )


def _of_several_labels(node: Any) -> Iterator[Flag]:
    """Torch's ``cross_entropy`` with a probability for each class: minus the sum of ``log_softmax * target``."""
    for _ in range(4):
        if kind_of(node) == "Mul":
            break
        node = source_of(node)
    if kind_of(node) != "Mul":
        return
    inputs = [parent for parent, _ in node.next_functions]
    if inputs.count(None) != 1 or kind_of(past_neutral(inputs[0] or inputs[1])) != "LogSoftmax":
        return
    target: Any = saved(node, "self" if inputs[0] is None else "other")
    if is_tensor(target) and target.dim() >= 2 and target.numel():
        values = target.detach()
        rows = values.sum(1)
        yield (
            ((values == 0) | (values == 1)).all() & (rows > 1).any(),
            "cross_entropy with several labels in one row: it is made for one class per row; for several use"
            " binary_cross_entropy_with_logits",
        )


def _of_two_sides(node: Any, name: str) -> Iterator[Flag]:
    """Rows that are alike and rows that are not, each chosen by its label: every row must be one of them."""
    sides = [part for part in near(node) if kind_of(part) == "Where"]
    chosen = [saved(side, "condition") for side in sides]
    if len(chosen) == 2 and all(map(is_tensor, chosen)) and chosen[0].shape == chosen[1].shape:
        first, second = (condition.detach() for condition in chosen)
        yield (~(first ^ second)).any(), f"{name} with labels that are neither 1 nor -1: such rows count for nothing"


_FEW = 16
"""Values that a tensor of loss weights has at most."""


def _of_learnt_weight(node: Any) -> Iterator[Flag]:
    """``weight * loss`` with a weight that is itself a parameter, as it is: what makes the product smaller is to lower it."""
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or None in parents:
        return
    for factor, other in (parents, parents[::-1]):
        leaf = past_neutral(factor)
        parameter: Any = getattr(leaf, "variable", None) if kind_of(leaf) == "AccumulateGrad" else None
        if not is_tensor(parameter) or parameter.numel() > _FEW or kind_of(past_neutral(other)) not in _ERRORS:
            continue
        # What the product was made with, not what the parameter is by now.
        value: Any = saved(node, "self" if factor is parents[0] else "other")
        if is_tensor(value):
            yield (
                (value.detach() < 0).any(),
                "a weight of a loss that is learnt has fallen below 0, so that this loss is made larger: learn its logarithm,"
                " with a term that holds it (exp(-s) * loss + s)",
            )


def _of_ratio(node: Any) -> Iterator[Flag]:
    """``exp(a - b)`` with a gradient on both sides and no difference: a policy divided by itself."""
    for parent in parents_of(node):
        ratio = past_neutral(parent)
        if kind_of(ratio) in ("Clamp", "Div"):
            ratio = past_neutral(source_of(ratio))
        inputs = [given for given, _ in source_of(ratio).next_functions] if kind_of(source_of(ratio)) == "Sub" else []
        if kind_of(ratio) != "Exp" or len(inputs) != 2 or None in inputs:
            continue
        result: Any = saved(ratio, "result")
        if is_tensor(result) and result.numel() > 1:
            yield (
                (result.detach() == 1).all(),
                "a ratio of probabilities that is 1 everywhere, with gradients on both sides: they cancel out; keep the old"
                " log probabilities from before the update, without gradients",
            )


ENOUGH = 1000
"""Labels from which on weights are compared with frequencies."""
_SETTLED = 20
"""Looks after which a probe that has found no weights stays silent."""


class ClassWeightProbe(CloserLooks):
    """Compares the weights of classes with how often each class comes.

    Weights are there to make rare classes count more. Where they grow with the frequency of the class instead, the formula
    was turned upside down: ``count / total`` for ``total / count``, ``positives / negatives`` for ``negatives / positives``.
    Counts are added up over the batches looked at; nothing is said before :data:`ENOUGH` labels.
    """

    name = "class-weights"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.weights_inverted",
            "1 if the weights of classes grow with how often the classes come, in proportion; else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "weights of classes"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self._counts: list[float] = []
        self._found = self._right = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step, keys = event.step, ("loss.weights_inverted",)
        if event.loss_graph is None or event.phase != "train" or not self.looks(event, demand, keys):
            return ()
        for node in near(event.loss_graph):
            given = _weights_and_counts(node)
            if given is not None:
                self._found = True
                weights, counts = (numbers(part) for part in given)
                judged = calculate(partial(self._judge, weights, counts), number(given[1].sum()))
                detail = partial(self._facts, weights)
                self.rest(demand, keys, calm=self._right or spread_over_ranks(given[1]))
                return (Sample("loss.weights_inverted", step, judged, detail=detail),)
        self._looks += 1
        self.rest_long(demand, keys)
        if not self._found and self._looks >= _SETTLED:
            self.rests_until = sys.maxsize
        return ()

    def _judge(self, weights: Any, counts: Any, total: float) -> float | None:
        del total  # that it has arrived says that the vectors have
        now = [float(n) for n in values_of(counts)]
        if len(self._counts) != len(now):
            self._counts = [0.0] * len(now)
        self._counts = [a + b for a, b in zip(self._counts, now, strict=True)]
        if sum(self._counts) < ENOUGH:
            return None
        inverted = grows_with(list(values_of(weights)), self._counts)
        self._right = not inverted
        return float(inverted)

    def _facts(self, weights: Any) -> Mapping[str, Any]:
        total = sum(self._counts) or 1.0
        shares = ", ".join(f"{n / total:.1%}" for n in self._counts[:6])
        return {
            "share of classes": shares,
            "weights": ", ".join(f"{float(w):.3g}" for w in list(values_of(weights))[:6]),
        }


def _weights_and_counts(node: Any) -> tuple[Any, Any] | None:
    """The weight of each class and how often each is a label, as two vectors; of a yes or no: no, yes."""
    import torch

    kind = kind_of(node)
    if kind in CROSS_ENTROPIES:
        weight, labels = saved(node, "weight"), saved(node, "target")
        if not is_tensor(weight) or not is_tensor(labels):
            return None
        classes = weight.numel()
        labels = labels.detach().flatten()
        known = ((labels >= 0) & (labels < classes) & (labels != _ignored(node))).float()
        counts = torch.zeros(classes, device=labels.device).index_add_(0, labels.clamp(0, classes - 1), known)
        return weight.detach().float(), counts
    if kind == "BinaryCrossEntropyWithLogits":
        weight, labels = saved(node, "pos_weight"), saved(node, "target")
        if not is_tensor(weight) or weight.numel() != 1 or not is_tensor(labels):
            return None
        yes = (labels.detach() > 0.5).float().sum()
        return (
            torch.stack([weight.new_ones(()).float(), weight.detach().float().reshape(())]),
            torch.stack([labels.numel() - yes, yes]),
        )
    return None


def _ignored(node: Any) -> int:
    index = int(node._saved_ignore_index)
    return index - 2**64 if index >= 2**63 else index


RARE = 3.0
"""How many times as often the most frequent class comes as the rarest, from where weights matter."""


def grows_with(weights: list[float], counts: list[float]) -> bool:
    """Whether weights are about proportional to counts: with a slope of 0.7 to 1.3 on logarithmic axes, and little beside it."""
    pairs = [(math.log(n), math.log(w)) for w, n in zip(weights, counts, strict=True) if w > 0 and n > 0]
    if len(pairs) < 2 or len(pairs) < len(weights) / 2:
        return False
    mean_n, mean_w = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    spread = sum((n - mean_n) ** 2 for n, _ in pairs)
    if max(n for n, _ in pairs) - min(n for n, _ in pairs) < math.log(RARE):
        return False
    slope = sum((n - mean_n) * (w - mean_w) for n, w in pairs) / spread
    beside = sum((w - mean_w - slope * (n - mean_n)) ** 2 for n, w in pairs) / spread
    return bool(0.7 <= slope <= 1.3 and beside <= 0.05)
