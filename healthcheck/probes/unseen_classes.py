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
from healthcheck.probes.looks import ask_again, next_look

FEWEST, EACH = 200, 10
"""Labels of the training, in all and for each class, after which a class that never came is missing."""
EVERY = 10
"""Steps between two looks once that many were seen."""


class UnseenClassProbe:
    """Keeps which classes were labels in training, and compares those of each evaluation with them.

    Labels of the training are read from what torch keeps for the backward pass of a cross entropy, those of an evaluation
    from the loss functions that it calls.
    """

    name = "unseen-classes"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.EVAL_END)
    provides: tuple[Metric, ...] = (
        Metric(
            "targets.unseen",
            "Part of an evaluation's labels whose class has been no label of the training so far.",
            "fraction",
            Cost.DEVICE,
            needs=("evaluation", "a cross entropy"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._seen: Any = None
        """For each class whether it was a label: a boolean tensor."""
        self._labels = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.EVAL_END:
            return self._compare(event)
        if event.phase == "train" and event.loss_graph is not None:
            self._count(event)
        return ()

    def _count(self, event: Event) -> None:
        import torch

        node: Any = next((node for node in near(event.loss_graph) if kind_of(node) in CROSS_ENTROPIES), None)
        labels: Any = None if node is None else saved(node, "target")
        answers: Any = None if node is None else log_probabilities(node)
        if not is_tensor(labels) or answers is None or type(answers) is not torch.Tensor:
            self.rests_until = ask_again(event.step)
            return
        classes = int(answers.shape[-1])
        if self._seen is None or len(self._seen) != classes or self._seen.device != labels.device:
            self._seen, self._labels = torch.zeros(classes + 1, dtype=torch.bool, device=labels.device)[:classes], 0
        inside = (labels >= 0) & (labels < classes)
        padded = torch.zeros(classes + 1, dtype=torch.bool, device=labels.device)
        padded[torch.where(inside, labels, classes).flatten()] = True  # what is ignored goes to a place of its own
        self._seen = self._seen | padded[:classes]
        self._labels += int(labels.numel())
        if self._labels >= max(FEWEST, EACH * classes):
            self.rests_until = next_look(event.step, EVERY)

    def _compare(self, event: Event) -> Iterable[Sample]:
        counts, seen = event.label_counts, self._seen
        if counts is None or seen is None or len(counts) != len(seen) or counts.device != seen.device:
            return ()
        if self._labels < max(FEWEST, EACH * len(seen)):
            return ()
        missing = counts * ~seen

        def facts() -> Mapping[str, Any]:
            which = missing.nonzero().flatten().tolist()
            return {
                "classes": ", ".join(map(str, which[:8])) + (f" and {len(which) - 8} more" if len(which) > 8 else "")
            }

        share = missing.sum() / counts.sum().clamp(min=1)
        return (Sample("targets.unseen", event.step, number(share), phase="eval", detail=facts),)
