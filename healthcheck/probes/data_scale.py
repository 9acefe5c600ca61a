"""Numbers that the data should keep: the size of inputs and targets from epoch to epoch, and of inputs against noise."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.graph import kind_of, kinds_behind, regression_targets, saved
from healthcheck.probes.looks import CloserLooks, ask_again, next_look, spread_over_ranks

FIRST, LAST = 3, 3
"""Looks at the beginning and at the end whose sizes are compared."""
MOST_VALUES = 65_536
"""Values of a batch that are read, at even distances."""
ALIKE = 3.0
"""Times by which a size may differ from that of the beginning and be about the same."""


class DataDriftProbe(CloserLooks):
    """Compares the size (root of the mean square) of inputs and targets with that of the first batches.

    Data that are changed in place where they are stored are changed again at each access: normalised images shrink from
    epoch to epoch, and boxes. Inputs are the first floating-point tensor of a batch from a loader, targets those of
    squared and absolute errors. For a quantity to have shrunk, all of the last looks must have; to have grown, likewise.
    """

    name = "data-drift"
    closely = 5
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "inputs.drift",
            f"Size of the inputs in the last {LAST} batches looked at, divided by that in the first {FIRST}.",
            cost=Cost.DEVICE,
            needs=("a batch from a loader",),
        ),
        Metric(
            "targets.drift",
            f"Size of a regression's targets in the last {LAST} batches looked at, divided by that in the first {FIRST}.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a regression"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, list[float]] = {"inputs.drift": [], "targets.drift": []}
        self._last: dict[str, deque[float]] = {key: deque(maxlen=LAST) for key in self._first}
        self._alike: dict[str, bool] = {}
        """Of each, whether its last size was about that of the first ones."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        keys = tuple(self._first)
        if event.phase != "train" or not self.looks(event, demand, keys):
            return ()
        found: list[tuple[str, Any]] = []
        if demand.wants("inputs.drift") and event.batch is not None:
            found.append(("inputs.drift", _first_floating(event.batch)))
        if demand.wants("targets.drift") and event.loss_graph is not None:
            found.append(("targets.drift", next(iter(regression_targets(event.loss_graph)), None)))
        found = [(key, values) for key, values in found if values is not None]
        if not found:
            self.rest_long(demand, keys)
            return ()
        samples = [
            Sample(key, event.step, calculate(partial(self._drift, key), number(_size(values))))
            for key, values in found
        ]
        together = any(spread_over_ranks(values) for _, values in found)
        self.rest(demand, keys, calm=together or all(self._alike.get(key, False) for key, _ in found))
        return samples

    def _drift(self, key: str, size: float) -> float | None:
        first, last = self._first[key], self._last[key]
        if len(first) < FIRST:
            first.append(size)
            return 1.0
        last.append(size)
        begun = statistics.median(first)
        self._alike[key] = begun / ALIKE < size < ALIKE * begun
        if begun <= 0 or len(last) < LAST:
            return 1.0
        return max(last) / begun if max(last) < begun else max(1.0, min(last) / begun)


def _first_floating(batch: Any) -> Any:
    return next((t for _, t in named_tensors(batch) if t.is_floating_point() and t.numel() > 1), None)


def _some(values: Any) -> Any:
    values = values.detach().flatten()
    return values[:: max(1, -(-values.numel() // MOST_VALUES))].float()


def _size(values: Any) -> Any:
    return _some(values).square().mean().sqrt()


FEWEST = 256
"""Values of a batch from which its distribution is judged."""
UNRELATED = 0.2
"""Correlation of inputs with noise under which next to nothing of it can be read off them."""
_INPUTS = {"Addmm": (1, "mat1"), "Mm": (0, "self"), "Convolution": (0, "input")}
"""Layers that read inputs: which of what they were made from these are, and how they keep them."""


class NoiseScaleProbe:
    """Compares the size of a model's inputs with that of the noise that it should find in them.

    Noise is a target of squared or absolute errors whose values look like a standard normal distribution (mean, spread and
    fourth moment) and which has the shape of an input of the model. Diffusion models are trained like this, and their
    data must be of about the size of the noise. Where inputs are many times larger and next to uncorrelated with it,
    the noise is lost in them. Further columns or channels of the input, such as those of the time, are left out.
    """

    name = "noise-scale"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "inputs.over_noise",
            "Size of the inputs divided by that of the noise to be predicted, where these are all but unrelated; else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "noise as a target"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._step = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        if event.loss_graph is None or event.phase != "train" or step == self._step:
            return ()
        self._step = step
        for targets in regression_targets(event.loss_graph):
            if targets.numel() < FEWEST or targets.dim() < 2:
                continue
            for inputs in _inputs(event.loss_graph, targets):
                return (Sample("inputs.over_noise", step, number(_over_noise(inputs, targets))),)
        self.rests_until = max(ask_again(step), demand.next_due(("inputs.over_noise",), step))
        return ()


def _inputs(root: Any, targets: Any) -> Iterator[Any]:
    """What a layer reads that the model has not made, in the shape of the targets."""
    for node, kind in kinds_behind(root):
        position, name = _INPUTS.get(kind, (0, ""))
        if not name:
            continue
        made = node.next_functions[position][0]
        # A table of learnt vectors may have been put beside the input.
        if made is not None and not (kind_of(made) == "Cat" and made.next_functions[0][0] is None):
            continue
        read = saved(node, name)
        if is_tensor(read) and read.device == targets.device and read.dim() >= 2 and len(read) == len(targets):
            if read.dim() == targets.dim() and read.shape[1] >= targets.shape[1]:
                read = read.detach()[:, : targets.shape[1]]
            if read.numel() == targets.numel():
                yield read.reshape(targets.shape)


def _over_noise(inputs: Any, targets: Any) -> Any:
    import torch

    noise, read = _some(targets), _some(inputs)
    mean, spread = noise.mean(), noise.std()
    normal = (noise - mean) / spread.clamp(min=1e-12)
    is_noise = (mean.abs() < 0.15) & ((spread - 1).abs() < 0.15) & ((normal.pow(4).mean() / 3 - 1).abs() < 0.3)
    size = read.square().mean().sqrt()
    apart = (read - read.mean()) / read.std().clamp(min=1e-12)
    unrelated = (apart * normal).mean().abs() < UNRELATED
    return torch.where(is_noise & unrelated, size / spread.clamp(min=1e-12), torch.zeros_like(size))


LARGE, SMALL = 200.0, 1 / 255
"""What the largest value of raw pixels exceeds, and what that of pixels that were divided twice does not."""
COLUMNS, ROWS = 64, 8
"""Values of a row and rows of a batch from which inputs are judged."""

OFTEN, SELDOM = 10, 200
"""Looks after which inputs are looked at more rarely, and steps from one of those to the next."""


class InputProbe:
    """Looks at what the first layers read: pixels as they are in files, or divided by 255 twice; rows that are all one.

    Pixels are whole numbers from 0 to 255, also such that were normalised by the mean and spread of pixels from 0 to 1, or whole
    multiples of 1 / 255² that do not exceed 1 / 255. A model that scales them
    itself reads scaled ones; one with batch norm, which does that, is left alone. Rows are judged where a loader gave
    the batch, and without one where they are asked for different numbers and are other ones at the next look.
    """

    name = "inputs"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_when_due = listens_to
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "inputs.pixel_scale",
            "255 if the first layer reads pixels from 0 to 255, 1/255 if it reads pixels divided by 255 twice; else 1.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "inputs of some size"),
        ),
        Metric(
            "inputs.columns",
            "Size of the largest input column, divided by the median of all, where the first layer reads a table; else 1.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "inputs of a linear layer"),
        ),
        Metric(
            "inputs.same_rows",
            "1 if all rows that the first layers read in a batch are the same, else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "rows of a batch"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._step = self._looks = 0
        self._row: Any = None
        """Of the last look at inputs that no loader gave: a sum over their first row, each column with a weight of its own."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        step = event.step
        keys = [key for key in ("inputs.pixel_scale", "inputs.columns", "inputs.same_rows") if demand.due(key, step)]
        if not keys or event.phase != "train" or step == self._step or event.loss_graph is None:
            return ()
        self._step = step
        self._looks += 1
        if self._looks >= OFTEN:  # a walk through the whole graph
            self.rests_until = next_look(step, SELDOM)
        nodes = kinds_behind(event.loss_graph)
        read = [
            tensor.detach()
            for node, kind in nodes
            if kind in _INPUTS and node.next_functions[_INPUTS[kind][0]][0] is None
            if is_tensor(tensor := saved(node, _INPUTS[kind][1])) and tensor.dim() >= 2 and len(tensor) >= ROWS
        ]
        if not read:
            if self._looks < OFTEN:
                self.rests_until = ask_again(step)
            return ()
        samples = []
        largest = max(read, key=lambda tensor: int(tensor[0].numel()))
        if "inputs.pixel_scale" in keys and largest[0].numel() >= COLUMNS:
            normalised = any(kind in ("NativeBatchNorm", "CudnnBatchNorm") for _, kind in nodes)
            samples.append(Sample("inputs.pixel_scale", step, number(_pixel_scale(largest, normalised))))
        if "inputs.columns" in keys and largest.dim() == 2 and largest.shape[1] >= 2 and largest.is_floating_point():
            samples.append(Sample("inputs.columns", step, number(_uneven_columns(largest))))
        wanted = True if event.batch is not None else None
        if "inputs.same_rows" in keys and wanted is None:
            wanted = _numbers_wanted(nodes, event.loss_graph)
        if "inputs.same_rows" in keys and wanted is not None:
            import torch

            here = [tensor for tensor in read if tensor.device == largest.device]
            # Nothing but zeros is the first state of a recurrent layer.
            empty = torch.stack([(tensor == 0).all() for tensor in here])
            same = torch.stack([(tensor[1:] == tensor[:1]).all() for tensor in here]).all() & ~empty.all()
            if event.batch is None:  # what is the same in each step may be a constant of the model's
                first = largest[0].float().reshape(-1)
                row = (first * torch.linspace(1, 2, len(first), device=first.device)).sum()
                same, self._row = same & wanted & (row != (row if self._row is None else self._row)), row
            samples.append(Sample("inputs.same_rows", step, number(same.float())))
        return samples


def _numbers_wanted(nodes: Sequence[tuple[Any, str]], root: Any) -> Any:
    """Whether rows are asked for different numbers, as a 0-dim tensor, where no tokens tell them apart; else None."""
    if any(kind == "Embedding" for _, kind in nodes):
        return None
    import torch

    differ = [(wanted != wanted.reshape(-1)[:1]).any() for wanted in regression_targets(root) if len(wanted) >= ROWS]
    return torch.stack(differ).any() if differ else None


BIG = 1000.0
"""Size of a column from which on it is no standardised one by any measure."""


def _uneven_columns(table: Any) -> Any:
    """Largest size of a column divided by the median size of all that are not constant at 0; 1 where none is big."""
    import torch

    sizes = table[: 4 * COLUMNS].float().square().mean(0).sqrt()
    most, usual = sizes.max(), sizes.where(sizes > 0, sizes.max()).median()
    return torch.where(most >= BIG, most / usual.clamp(min=1e-12), torch.ones_like(most))


WIDE = 300.0
"""Range of pixels from 0 to 255 that were divided by a number below 1: by the spread of pixels from 0 to 1."""


def _spread_pixels(channel: Any) -> Any:
    """Whether a channel has at most 256 values at even distances, as pixels do after ``(x - mean) / std``, over a wide range."""
    import torch

    values = _some(channel).float().sort().values
    apart = values[1:] - values[:-1]
    step = torch.where(apart > 1e-3, apart, torch.inf).min()
    levels = (values - values[0]) / step
    return (
        ((levels - levels.round()).abs() < 0.05).all()
        & (levels[-1] > 100)
        & (levels[-1] < 255.5)
        & (values[-1] - values[0] > WIDE)
    )


def _pixel_scale(values: Any, normalised: bool) -> Any:
    import torch

    some = _some(values)
    least, most = some.min(), some.max()
    whole = ((some - some.round()).abs() < 1e-3).all()
    raw = whole & (least >= 0) & (most > LARGE) & (most <= 255) & (not normalised)
    steps = some * 255.0 * 255.0
    twice = ((steps - steps.round()).abs() < 0.05).all() & (least >= 0) & (most <= SMALL * 1.001) & (most > SMALL / 2)
    one = torch.ones_like(most)
    if values.dim() == 4:
        raw = raw | (_spread_pixels(values[:, 0]) & (not normalised))
    return torch.where(raw, one * 255, torch.where(twice, one / 255, one))
