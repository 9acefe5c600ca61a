"""The order of labels, where no loader shows its batches: read from the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, numbers
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.graph import CROSS_ENTROPIES, kind_of, near, saved
from healthcheck.probes.looks import ask_again

FEWEST = 8
"""Rows of a batch that are not alike by chance."""


class LabelOrderProbe:
    """Tells batches whose rows all have one label, where others have another one: rows sorted by class, taken in order.

    For loops that slice their tensors themselves. Labels are the targets of a cross entropy, one for each row. A run in
    which all batches have the same label has its targets at a fixed place (the positive of a contrastive loss), or one
    class.
    """

    name = "label-order"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
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
        self.rests_until = 0
        self._alone: set[float] = set()
        """Labels that were all of a batch's. One alone may be what most rows have."""
        self._step = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.phase != "train" or event.step == self._step or not demand.due("targets.one_label", event.step):
            return ()
        self._step = event.step
        labels: Any = None
        if event.batch is None:
            node = next((node for node in near(event.loss_graph) if kind_of(node) in CROSS_ENTROPIES), None)
            labels = None if node is None else saved(node, "target")
        if not is_tensor(labels) or labels.dim() != 1 or labels.numel() < FEWEST:
            self.rests_until = ask_again(event.step)
            return ()
        import torch

        ends = numbers(torch.stack(labels.detach().aminmax()).double())
        return (Sample("targets.one_label", event.step, calculate(self._is_sorted, ends)),)

    def _is_sorted(self, ends: Any) -> float:
        least, most = ends
        if least == most and len(self._alone) < 2:
            self._alone.add(least)
        return float(least == most and len(self._alone) > 1)
