"""Label leaks: columns of the input that give the label away by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.graph import CROSS_ENTROPIES, DISTANCES, all_behind, kind_of, near, regression_targets, saved
from healthcheck.probes.labels import first_few
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 5, 10, 20)
"""Backward passes whose graph is looked at."""
FEW_ROWS = 24
"""Rows, beyond one of each class, below which a column may fit by chance."""
OTHER_COLUMNS = 4
"""Columns that vary within a class, at the least: in a table of prototypes or of one number all of them give the label away."""
COLUMNS, CLASSES = 4096, 64
"""Wider tables and more classes are not looked at."""
SAME = 1e-6
"""Part of a column's range by which equal values may differ."""

_BINARY = ("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy")
_TABLES = {"Addmm": (1, "mat1"), "Mm": (0, "self")}
"""Linear layers of a table of rows, which of their inputs is the table, and how they call it."""


class LabelLeakProbe(GraphProbe):
    """Counts columns of a table that give the label away, at a few early steps.

    Of classes: columns of one value for each class, in all rows of the batch, that together tell the classes apart. Of
    numbers: columns on one straight line with the target. Other columns must vary, so that prototypes without noise
    and toys of a few columns are left alone. The table is what the first linear layer keeps of its input for the
    backward pass.
    """

    name = "label-leak"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "input.tells_label",
            "Columns of the input table that give away the label on their own.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a table of inputs"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        at_end = _at_end_of_window(event)
        if at_end is not None:
            facts = {"which": "the last time step of the input, which is the first one that is predicted"}
            return (Sample("input.tells_label", event.step, number(at_end), detail=lambda: facts),)
        targets = list(_targets(event.loss_graph))
        if len(targets) != 1:
            return ()
        wanted, of_classes = targets[0]
        for table in _tables(event.loss_graph, wanted):
            columns = _of_classes(table, wanted) if of_classes else _of_numbers(table, wanted)
            if columns is not None:
                return (Sample("input.tells_label", event.step, number(columns.sum()), detail=_facts(columns)),)
        return ()


WINDOW = 4
"""Time steps of a window, at the least."""


def _at_end_of_window(event: Event) -> Any:
    """Whether the last step of a window of numbers is what is predicted from it: a 0-dim tensor, 0 or 1; None for other
    inputs.

    Windows are (rows, time) or (rows, time, features), as a loader shows them; targets those of squared and absolute errors.
    """
    windows = next((t for _, t in named_tensors(event.batch) if t.is_floating_point() and t.dim() in (2, 3)), None)
    wanted = next(iter(regression_targets(event.loss_graph)), None)
    if windows is None or wanted is None or wanted.device != windows.device:
        return None
    rows = windows.shape[0]
    if windows.shape[1] < WINDOW or wanted.numel() % rows or wanted.shape[0] != rows or rows < FEW_ROWS:
        return None
    first = wanted.detach().reshape(rows, -1)[:, :1]
    last = windows.detach()[:, -1].reshape(rows, -1)
    before = windows.detach()[:, -2].reshape(rows, -1)
    if wanted.numel() == windows.numel():  # the window itself is wanted
        return None
    # Of a window that repeats its values nothing can be said.
    varied = ((last != before).float().mean() > 0.5) & (first != first[:1]).any()
    return ((last == first).all(0).any() & varied).float()


def _targets(root: Any) -> Iterator[tuple[Any, bool]]:
    """Targets of the losses that make up this one, one for each row, and whether they are classes."""
    for node in near(root):
        kind = kind_of(node)
        if kind in (*CROSS_ENTROPIES, *DISTANCES, *_BINARY):
            wanted = saved(node, "target")
            if is_tensor(wanted) and wanted.dim() and wanted.numel() == wanted.shape[0]:
                yield wanted.detach().reshape(-1), kind in CROSS_ENTROPIES


def _tables(root: Any, wanted: Any) -> Iterator[Any]:
    """Inputs of linear layers, of one row for each target, that were not made by the model."""
    for node in all_behind(root):
        position, name = _TABLES.get(kind_of(node), (0, ""))
        if name and node.next_functions[position][0] is None:
            table = saved(node, name)
            if not is_tensor(table) or table.shape[0] != len(wanted) or table.device != wanted.device:
                continue
            if OTHER_COLUMNS < table.shape[1] <= COLUMNS:
                yield table.detach().float()


def _of_classes(table: Any, labels: Any) -> Any:
    """Boolean, one for each column; None if the batch has too few rows or too many classes."""
    import torch

    if len(labels) < FEW_ROWS or labels.is_floating_point():
        return None
    if on_host(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < CLASSES:
        return None
    inside = (labels >= 0) & (labels < CLASSES)
    index = labels.clamp(0, CLASSES - 1)
    counts = torch.zeros(CLASSES, device=table.device).index_add_(0, index, torch.ones_like(index, dtype=torch.float32))
    there = counts > 0
    sums = torch.zeros(CLASSES, table.shape[1], device=table.device).index_add_(0, index, table)
    means = sums / counts.clamp(min=1).unsqueeze(1)
    low, high = table.aminmax(dim=0)
    reach = high - low
    fixed = ((table - means[index]).abs().amax(0) <= SAME * reach) & (reach > 0)
    known = torch.where(fixed, means / reach.clamp(min=1e-30), torch.zeros_like(means))
    apart = torch.cdist(known, known, p=float("inf")) > 0.01
    both = there.unsqueeze(0) & there.unsqueeze(1) & ~torch.eye(CLASSES, dtype=torch.bool, device=table.device)
    enough = (len(labels) - there.sum() >= FEW_ROWS) & (there.sum() > 1) & inside.all() & (apart | ~both).all()
    return fixed & enough & _others(fixed, reach)


def _of_numbers(table: Any, wanted: Any) -> Any:
    """Boolean, one for each column; None if the batch has too few rows."""
    if len(wanted) < FEW_ROWS:
        return None
    columns = table.double() - table.double().mean(0)
    line = (wanted.double() - wanted.double().mean()).unsqueeze(1)
    sizes = columns.square().sum(0), line.square().sum()
    slope = (columns * line).sum(0) / sizes[1].clamp(min=1e-30)
    left = (columns - slope * line).square().sum(0)
    low, high = table.aminmax(dim=0)
    fixed = (left <= SAME**2 * sizes[0]) & (sizes[0] > 0) & (sizes[1] > 0)
    return fixed & _others(fixed, high - low)


def _others(fixed: Any, reach: Any) -> Any:
    return (~fixed & (reach > 0)).sum() >= OTHER_COLUMNS


def _facts(columns: Any) -> Callable[[], Mapping[str, Any]]:
    def facts() -> Mapping[str, Any]:
        return {"which": first_few([f"column {int(at)}" for at in columns.nonzero().flatten()])}

    return facts
