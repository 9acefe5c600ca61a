"""Labels as the loss has them: classes that no label of the training ever had, rows sorted by class, labels that are hardly ever 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, numbers
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import cross_entropy_of, kind_of, log_probabilities, near, saved
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import (
    LOOK_EVERY,
    LOOK_SELDOM,
    LOOK_SETTLED,
    CloserLooks,
    ask_again,
    next_look,
    spread_over_ranks,
)

FEWEST, EACH = 200, 10
"""Labels of the training, in all and for each class, after which a class that never came is missing."""


class TrainedClasses:
    """Which classes were labels in training. One for the probes of a session: one fills it, the other reads it."""

    def __init__(self) -> None:
        self.seen: Any = None
        """For each class whether it was a label: a boolean tensor (classes)."""
        self.labels = 0
        """Labels looked at."""

    @property
    def known(self) -> bool:
        """Whether so many were looked at that a class which never came is missing."""
        return self.seen is not None and self.labels >= max(FEWEST, EACH * len(self.seen))

    def add(self, labels: Any, classes: int) -> None:
        """Labels of one batch, of so many classes; others are ignored."""
        import torch

        if self.seen is None or len(self.seen) != classes or self.seen.device != labels.device:
            self.seen, self.labels = torch.zeros(classes, dtype=torch.bool, device=labels.device), 0
        inside = (labels >= 0) & (labels < classes)
        there = torch.zeros(classes + 1, dtype=torch.bool, device=labels.device)
        # What is ignored goes to a place of its own. An assignment by index would bring its value from the host, and wait.
        there.index_fill_(0, torch.where(inside, labels, classes).flatten(), True)
        self.seen = self.seen | there[:classes]
        self.labels += int(labels.numel())


class TrainedClassProbe:
    """Notes the classes of the training, as torch keeps them for the backward pass of a cross entropy."""

    name = "trained-classes"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.classes",
            "Classes that have been labels in training so far.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a cross entropy"),
        ),
    )

    def __init__(self, classes: TrainedClasses | None = None) -> None:
        self.rests_until = 0
        self._all = 0
        """How many classes there are, where each has been a label."""
        self._classes = classes or TrainedClasses()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        import torch

        if event.phase != "train":
            return ()
        node: Any = cross_entropy_of(event.loss_graph)
        labels: Any = None if node is None else saved(node, "target")
        answers: Any = None if node is None else log_probabilities(node)
        if not is_tensor(labels) or answers is None or type(answers) is not torch.Tensor:
            self.rests_until = ask_again(event.step)
            return ()
        classes = int(answers.shape[-1])
        self._classes.add(labels, classes)
        count = calculate(partial(self._counted, classes), number(self._classes.seen.sum()))
        if self._classes.known:
            # All of them: no further look can add one, but for the first of another training in this process.
            self.rests_until = next_look(event.step, LOOK_EVERY, LOOK_SELDOM if self._all == classes else LOOK_SETTLED)
        return (Sample("targets.classes", event.step, count),)

    def _counted(self, classes: int, count: float) -> float:
        """The number of classes seen has arrived: were these all?"""
        self._all = classes if count >= classes else 0
        return count


class UnseenClassProbe:
    """Compares the labels of each evaluation, as its loss functions get them, with the classes of the training."""

    name = "unseen-classes"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_END,)
    only_with = "label_counts"
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.unseen",
            "Part of an evaluation's labels whose class has been no label of the training so far.",
            "fraction",
            Cost.DEVICE,
            needs=("evaluation", "a cross entropy"),
        ),
    )

    def __init__(self, classes: TrainedClasses | None = None) -> None:
        self._classes = classes or TrainedClasses()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        counts, seen = event.label_counts, self._classes.seen
        if counts is not None and counts.dim() > 1:
            counts = counts.sum(1)
        if counts is None or not self._classes.known or len(counts) != len(seen) or counts.device != seen.device:
            return ()
        missing = counts * ~seen
        place = where_called(event, "loader") or where_called(event, "eval")

        def facts() -> Mapping[str, Any]:
            which = missing.nonzero().flatten().tolist()
            return {
                "classes": ", ".join(map(str, which[:8])) + (f" and {len(which) - 8} more" if len(which) > 8 else "")
            } | place

        share = missing.sum() / counts.sum().clamp(min=1)
        return (Sample("targets.unseen", event.step, number(share), phase="eval", detail=facts),)


# --------------------------------------------------------------------------------------------------
# Their order, where no loader shows its batches.


ROWS = 8
"""Rows of a batch that are not alike by chance."""


class LabelOrderProbe(CloserLooks):
    """Tells batches whose rows all have one label, where others have another one: rows sorted by class, taken in order.

    For loops that slice their tensors themselves. Labels are the targets of a cross entropy, one for each row. A run in
    which all batches have the same label has its targets at a fixed place (the positive of a contrastive loss), or one
    class.
    """

    name = "label-order"
    closely = 5
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.one_label",
            "1 if all rows of a batch have the same label and other batches had another one, else 0; without a loader.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a cross entropy", "batches without a loader"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._alone: set[float] = set()
        """Labels that were all of a batch's. One alone may be what most rows have."""
        self._mixed = False
        """Whether the last batch that was looked at had rows of several labels."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        keys = ("targets.one_label",)
        if event.phase != "train" or not self.looks(event, demand, keys):
            return ()
        labels: Any = None
        if event.batch is None:
            node = cross_entropy_of(event.loss_graph)
            labels = None if node is None else saved(node, "target")
        if not is_tensor(labels) or labels.dim() != 1 or labels.numel() < ROWS:
            self.rest_long(demand, keys)
            return ()
        import torch

        ends = numbers(torch.stack(labels.detach().aminmax()).double())
        sample = Sample("targets.one_label", event.step, calculate(self._is_sorted, ends))
        self.rest(demand, keys, calm=self._mixed or spread_over_ranks(labels))
        return (sample,)

    def _is_sorted(self, ends: Any) -> float:
        least, most = ends
        self._mixed = least != most
        if least == most and len(self._alone) < 2:
            self._alone.add(least)
        return float(least == most and len(self._alone) > 1)


# --------------------------------------------------------------------------------------------------
# Rare labels of a loss with a yes or no for each: whether the model ever says yes, and whether it knows more than frequencies.


RARE = 0.1
"""Part of the labels that are 1, up to which these are rare."""
ENOUGH = 8
"""Looks after which frequencies are known well enough."""
OFTEN = 0.25
"""Labels predicted to be 1, as a part of those that are, above which a model surely says yes to rare ones."""

_KEYS = _PREDICTED, _OVER = ("labels.predicted", "loss.over_rates")


class RareLabelProbe(CloserLooks):
    """Counts how many labels a model gives more than one half, against how many are 1, and compares its loss with that of
    somebody who only knows how frequent each label is.

    Read from what torch keeps for the backward pass of a binary cross entropy; weights do not enter. Frequencies are those
    of the batches looked at before, with one half added to each count (Krichevsky and Trofimov, 1981).
    """

    name = "rare-labels"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
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
        super().__init__()
        self._ones: Any = None
        self._rows = 0.0
        self._looks = 0
        self._predicts = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or not self.looks(event, demand, _KEYS):
            return ()
        for node in near(event.loss_graph):
            kind = kind_of(node)
            if kind in ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"):
                answers, labels = saved(node, "self"), saved(node, "target")
                if is_tensor(answers) and is_tensor(labels) and answers.shape == labels.shape and labels.dim():
                    samples = self._samples(answers.detach(), labels.detach(), kind, step)
                    self.rest(demand, _KEYS, calm=self._predicts or spread_over_ranks(answers))
                    return samples
        self.rest_long(demand, _KEYS)
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
            Sample(_PREDICTED, step, calculate(self._note, number(share))),
            Sample(_OVER, step, number(cost.mean() / base.mean().clamp(min=1e-12))),
        )

    def _note(self, share: float) -> float:
        self._predicts = share > OFTEN
        return share
