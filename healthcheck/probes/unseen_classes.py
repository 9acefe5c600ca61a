"""Classes that are evaluated and that no label of the training ever had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import CROSS_ENTROPIES, kind_of, log_probabilities, near, saved
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import ask_again, next_look

FEWEST, EACH = 200, 10
"""Labels of the training, in all and for each class, after which a class that never came is missing."""
EVERY = 10
"""Steps between two looks once that many were seen."""


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
        self._classes = classes or TrainedClasses()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        import torch

        if event.phase != "train":
            return ()
        node: Any = next((node for node in near(event.loss_graph) if kind_of(node) in CROSS_ENTROPIES), None)
        labels: Any = None if node is None else saved(node, "target")
        answers: Any = None if node is None else log_probabilities(node)
        if not is_tensor(labels) or answers is None or type(answers) is not torch.Tensor:
            self.rests_until = ask_again(event.step)
            return ()
        self._classes.add(labels, int(answers.shape[-1]))
        if self._classes.known:
            self.rests_until = next_look(event.step, EVERY)
        return (Sample("targets.classes", event.step, number(self._classes.seen.sum())),)


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
