"""Classifiers and language models that have learnt how often each label comes, and nothing of when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import CROSS_ENTROPIES, kind_of, near, past_neutral, signed, source_of
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

ROWS = 256
"""Labels of a batch for which the two answers are compared, at even distances; all of them are counted."""
FEW = 8
"""Labels of a batch below which nothing is said."""
SETTLED = 20
"""Batches after which the counts are worth a comparison."""

_KEY = "loss.over_frequencies"


class FrequencyProbe:
    """Compares the model's answers with those of somebody who only counts labels, on the same labels.

    Both pay the negative logarithm of the probability that they gave to each label. The counter gives every label its
    frequency in the batches looked at before, with one half added to each (Krichevsky and Trofimov, 1981), so that it
    knows nothing of the batch at hand. Read from what torch keeps for the backward pass of a cross entropy: weights of
    classes and label smoothing do not enter.
    """

    name = "label-frequencies"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            "Cost of the labels under the model, divided by their cost under the frequencies of labels so far; 1 is no better.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a cross entropy"),
        ),
    )

    def __init__(self) -> None:
        self._step = 0
        self._counts: Any = None
        self._looks = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.loss_graph is None or event.phase != "train" or event.step == self._step:
            return ()
        if not demand.due(_KEY, event.step):
            return ()
        self._step = event.step
        node: Any = next((node for node in near(event.loss_graph) if kind_of(node) in CROSS_ENTROPIES), None)
        softmax: Any = past_neutral(source_of(node)) if node is not None else None
        labels: Any = saved(node, "target")
        answers = saved(softmax, "result") if kind_of(softmax) == "LogSoftmax" else None
        if answers is None or not is_tensor(labels) or labels.numel() < FEW:
            return ()
        answers, dim = answers.detach(), signed(int(softmax._saved_dim))
        if type(answers).__name__ != "Tensor":  # spread over ranks: what is computed of it may be exchanged
            return ()
        if dim % answers.dim() != answers.dim() - 1 or answers.numel() != labels.numel() * answers.shape[-1]:
            return ()
        value = self._compare(answers.flatten(0, -2), labels.detach().flatten(), signed(int(node._saved_ignore_index)))
        return (Sample(_KEY, event.step, scalar(value)),) if self._looks > SETTLED else ()

    def _compare(self, answers: Any, labels: Any, left_out: int) -> Any:
        import torch

        classes = answers.shape[-1]
        known = self._counts
        if known is None or known.shape[0] != classes or known.device != labels.device:
            known = self._counts = torch.full((classes,), 0.5, device=labels.device)
            self._looks = 0
        counts = (labels != left_out) & (labels >= 0) & (labels < classes)
        labels = labels.clamp(0, classes - 1)
        frequencies = (known / known.sum()).log()
        apart = max(1, labels.shape[0] // ROWS)
        some, weights = labels[::apart], counts[::apart].float()
        given = answers[::apart].gather(1, some.unsqueeze(1)).squeeze(1).float()
        cost, base = (given * weights).sum(), (frequencies[some] * weights).sum()
        known.index_add_(0, labels, counts.float())
        self._looks += 1
        return torch.where(base < 0, cost / base.clamp(max=-1e-6), torch.zeros_like(base))
