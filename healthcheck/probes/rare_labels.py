"""Rare labels of a loss with a yes or no for each: whether the model ever says yes, and whether it knows more than frequencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import kind_of, near, saved
from healthcheck.probes.looks import ask_again

RARE = 0.1
"""Part of the labels that are 1, up to which these are rare."""
ENOUGH = 8
"""Looks after which frequencies are known well enough."""

_KEYS = _PREDICTED, _OVER = ("labels.predicted", "loss.over_rates")


class RareLabelProbe:
    """Counts how many labels a model gives more than one half, against how many are 1, and compares its loss with that of
    somebody who only knows how frequent each label is.

    Read from what torch keeps for the backward pass of a binary cross entropy; weights do not enter. Frequencies are those
    of the batches looked at before, with one half added to each count (Krichevsky and Trofimov, 1981).
    """

    name = "rare-labels"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            _PREDICTED,
            f"Labels predicted to be 1 as a part of those that are, where fewer than {RARE:.0%} are; else 1.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a binary cross entropy"),
        ),
        Metric(
            _OVER,
            "Binary cross entropy of the model divided by that of each label's frequency so far.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a binary cross entropy"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._step = 0
        self._ones: Any = None
        self._rows = 0.0
        self._looks = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or step == self._step:
            return ()
        self._step = step
        for node in near(event.loss_graph):
            kind = kind_of(node)
            if kind in ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"):
                answers, labels = saved(node, "self"), saved(node, "target")
                if is_tensor(answers) and is_tensor(labels) and answers.shape == labels.shape and labels.dim():
                    return self._samples(answers.detach(), labels.detach(), kind, step)
        self.rests_until = max(ask_again(step), demand.next_due(_KEYS, step))
        return ()

    def _samples(self, answers: Any, labels: Any, kind: str, step: int) -> Iterable[Sample]:
        import torch

        labels = (labels.reshape(len(labels), -1) if labels.dim() > 1 else labels.unsqueeze(1)).float()
        answers = answers.reshape(labels.shape).float()
        logits = answers if kind.endswith("Logits") else answers.clamp(1e-7, 1 - 1e-7).logit()
        ones = labels.sum(0)
        if self._ones is None or self._ones.shape != ones.shape or self._ones.device != ones.device:
            self._ones, self._rows, self._looks = torch.full_like(ones, 0.5), 1.0, 0
        rates = (self._ones / self._rows).clamp(1e-6, 1 - 1e-6).logit().expand_as(labels)
        self._ones, self._rows, self._looks = self._ones + ones, self._rows + len(labels), self._looks + 1
        if self._looks <= ENOUGH:
            return ()
        cost = torch.nn.functional.softplus(logits) - logits * labels
        base = torch.nn.functional.softplus(rates) - rates * labels
        right = labels.sum()
        rare = (self._ones.sum() < RARE * self._rows * len(ones)) & (right > 0)
        share = torch.where(rare, (logits > 0).sum() / right.clamp(min=1), torch.ones_like(right))
        return (
            Sample(_PREDICTED, step, number(share)),
            Sample(_OVER, step, number(cost.mean() / base.mean().clamp(min=1e-12))),
        )
