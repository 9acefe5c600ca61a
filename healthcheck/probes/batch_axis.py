"""Where the batch is in each tensor of a forward pass, followed through the graph of the loss from the data to the answers.

A supervised model answers each row of a batch for itself: what a row is answered does not depend on which others came with it
(batch norm aside). Where a dimension is the wrong one, it does, and no error is raised while the sizes happen to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.batches import named_tensors
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    REDUCING,
    all_behind,
    kind_of,
    made_of,
    saved,
    shape_of,
    signed,
)
from healthcheck.probes.labels import first_few, where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 50)
"""Backward passes whose graph is looked at: each look walks through the whole graph once."""
FEWEST = 4
"""Rows of a batch that is looked at: sizes of 1 to 3 are those of many other dimensions."""

_LOSSES = (*CROSS_ENTROPIES, *DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_TO_LOSSES = (*REDUCING, *NEUTRAL)
_ELEMENTWISE = frozenset((
    "Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Sqrt", "Rsqrt", "Exp", "Log", "Log1p", "Abs", "Neg", "Sin", "Cos", "Erf",
    "Reciprocal", "Square", "Clamp", "ClampMin", "ClampMax", "Where", "Maximum", "Minimum", "MaskedFill", "Lerp", "Addcmul", "Addcdiv",
    "Relu", "Tanh", "Sigmoid", "Gelu", "Silu", "Elu", "LeakyRelu", "Softplus", "LogSigmoid", "Hardtanh", "Hardswish", "Hardsigmoid",
    "Mish", "PreluKernel", "Threshold", "NativeDropout", "FusedDropout", "Clone", "ToCopy", "Alias", "Contiguous",
))  # fmt: skip
"""A value of the result is made of the values at its own place."""
_IN_PLACE = frozenset((
    "Convolution", "MkldnnConvolution", "CudnnConvolution", "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "FusedRmsNorm",
    "NativeGroupNorm", "MaxPool2DWithIndices", "MaxPool1DWithIndices", "MaxPool3DWithIndices", "AvgPool2D", "AvgPool3D",
    "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleBilinear2D",
    "ConstantPadNd", "ReflectionPad1D", "ReflectionPad2D", "ReplicationPad1D", "ReplicationPad2D", "Glu",
))  # fmt: skip
"""The first dimension stays where it is, and its rows are kept apart; batch norm is meant to mix them."""
_VIEWS = ("View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze")
_REDUCING = frozenset((
    "Sum", "Mean", "Amax", "Amin", "Max", "Min", "LinalgVectorNorm", "Norm", "Logsumexp", "Std", "Var", "Prod", "Argmax",
))  # fmt: skip
_TELLING = {
    "Amax": "maximum", "Max": "maximum", "Amin": "minimum", "Min": "minimum", "LinalgVectorNorm": "norm", "Norm": "norm",
}  # fmt: skip
"""Reductions over the batch by which nobody scales on purpose; a mean and a spread over it may be a batch norm by hand."""
_ALONG = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Cumsum": "cumsum", "Cumprod": "cumprod"}
_ARRANGING = frozenset((
    *_VIEWS, *_REDUCING, *_IN_PLACE, *_ALONG, "Unsqueeze", "Expand", "Repeat", "T", "Transpose", "Permute", "Select", "Slice",
))  # fmt: skip
_TURNING = ("Flip", "Roll", "Sort")
"""Along the batch these make pairs of rows on purpose: mixed examples, negatives."""
_RECURRENT = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn")
_READING = {"Addmm": (1, "mat1"), "Mm": (0, "self"), "Convolution": (0, "input"), "Embedding": (0, "indices")}
"""Layers that may read data: which of what they were made from that is, and how they keep it."""


class Rows(NamedTuple):
    """A tensor with values of each row: where its rows are."""

    axis: int
    outer: int = 1
    """The dimension is ``outer`` x rows x ``inner`` long, the last one running fastest."""
    inner: int = 1


class OneRow(NamedTuple):
    """A tensor that was made of a single row of the batch."""

    words: str


class OfAll(NamedTuple):
    """A tensor without a batch that was made of all its rows."""

    words: str


class Flat(NamedTuple):
    """Rows and positions in one dimension, in an order that shows where they are taken apart."""


State = Rows | OneRow | OfAll | Flat | None
"""None: not known, or not of the batch."""


class BatchAxisProbe(GraphProbe):
    """Follows the rows of a loader's batch through the model, operation by operation, and says where they meet.

    What counts: an answer that is made of one row of the batch alone (``out[-1]`` where the batch comes first), rows that were
    put behind each other and are read as columns, values divided by the maximum or norm of the whole batch, a softmax or
    cumulative sum along it, rows put together with others in another order (``repeat`` against
    ``repeat_interleave``), answers in another order than their targets. Where an operation is not known, nothing is said of what comes after it.
    Shapes and sizes only; no value is read.
    """

    name = "batch-axis"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.rows_meet",
            "Operations by which the answers for a row are made of other rows of its batch, batch norm aside.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a batch from a loader"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        tensors = (
            [tensor for _, tensor in named_tensors(event.batch) if tensor.dim()] if event.batch is not None else []
        )
        rows = {int(tensor.shape[0]) for tensor in tensors}
        if len(rows) != 1 or min(rows) < FEWEST:
            return ()
        found = list(dict.fromkeys(rows_that_meet(event.loss_graph, min(rows), tensors)))
        facts = {"which": first_few(found)} | where_called(event, "backward")
        return (Sample("layers.rows_meet", event.step, float(len(found)), detail=(lambda: facts) if found else None),)


def rows_that_meet(root: Any, rows: int, batch: Sequence[Any] = ()) -> Iterator[str]:
    """Where rows of a batch get into the answers of others, in words.

    :param rows: how many rows the batch has.
    :param batch: its tensors, each with the rows first.
    """
    for loss, kind in made_of(root, _TO_LOSSES):
        target: Any = saved(loss, "target") if kind in _LOSSES else None
        inputs = [parent for parent, _ in loss.next_functions[:2]]
        if not is_tensor(target) or not target.dim() or target.shape[0] % rows or inputs[0] is None:
            continue
        if len(inputs) > 1 and inputs[1] is not None and kind not in CROSS_ENTROPIES:
            continue  # both sides are trained: vectors are compared, not answers with targets
        answers = inputs[0]
        follow = Following(rows)
        state = follow.through(all_behind(answers))
        yield from follow.found
        if isinstance(state, OneRow) and int(target.shape[0]) == rows:
            yield f"the answers of all {rows} rows are made of a single row: {state.words}"
        elif isinstance(state, Rows) and state.axis == 0 and state.outer > 1 and state.inner == 1:
            positions = target.numel() // rows
            if target.dim() == 1 and positions == state.outer and _with_rows_first(target, rows, positions, batch):
                yield (
                    f"answers run through positions first, ({state.outer} x {rows}), and their targets through rows,"
                    f" ({rows} x {positions}): transpose(0, 1) before they are flattened"
                )


def _with_rows_first(target: Any, rows: int, positions: int, batch: Sequence[Any]) -> bool:
    """Whether targets are a flat view of a tensor of the batch, (rows, positions)."""
    return any(
        tensor.data_ptr() == target.data_ptr()
        and tuple(tensor.shape) == (rows, positions)
        and tensor.is_contiguous()
        and rows != positions
        for tensor in batch
    )


class Following:
    """The state of each node, from those that read data to the last one; what was found on the way."""

    def __init__(self, rows: int) -> None:
        self.found: list[str] = []
        self._rows = rows
        self._states: dict[int, State] = {}

    def through(self, nodes: Sequence[Any]) -> State:
        """:param nodes: each after those that it was made from."""
        state: State = None
        for node in nodes:
            state = self._after(node, kind_of(node))
            if state is not None:
                self._states[id(node)] = state
        return state

    def _given(self, node: Any) -> list[tuple[Any, State, tuple[int, ...]]]:
        """What a node was made from: node, state and shape of each."""
        found = []
        for parent, index in node.next_functions:
            state = self._states.get(id(parent)) if parent is not None else None
            shape = _shape(parent, index)
            if index and isinstance(state, Rows):
                state = self._of_further_result(parent, shape, state)
            found.append((parent, state, shape))
        return found

    def _of_further_result(self, parent: Any, shape: tuple[int, ...], state: Rows) -> State:
        """State of the second and further results of a node."""
        if kind_of(parent) in ("Split", "UnsafeSplit", "SplitWithSizes", "Unbind", "UnsafeSplitWithSizes"):
            return state
        if kind_of(parent) in _RECURRENT:  # the last hidden state: (rows, features), or with the layers in front
            return Rows(len(shape) - 2) if len(shape) > 1 and shape[-2] == self._rows else None
        return None

    def _after(self, node: Any, kind: str) -> State:
        if kind in _RECURRENT:
            return self._recurrent(node)
        if kind in _READING:
            place, name = _READING[kind]
            if kind == "Embedding" or node.next_functions[place][0] is None:
                return self._read(node, kind, saved(node, name))
        given = self._given(node)
        known = [state for _, state, _ in given if state is not None]
        if not known:
            return None
        shape = shape_of(node)
        if kind in _ELEMENTWISE:
            return self._together(kind, given, shape)
        if kind in ("Cat", "Stack"):
            return self._joined(node, kind, given, shape)
        if kind in ("Bmm", "Baddbmm", "Addmm", "Mm") or kind.startswith("ScaledDotProduct"):
            return self._product(kind, given, shape)
        first, state, before = given[0]
        if state is None or first is None:
            return None
        if isinstance(state, Flat):
            at = [place for place, size in enumerate(shape) if size == self._rows]
            return Rows(at[0]) if kind in _VIEWS and len(at) == 1 and at[0] < 2 else None
        if not isinstance(state, Rows):
            return state if kind in _ARRANGING else None
        return self._alone(node, kind, state, before, shape)

    def _read(self, node: Any, kind: str, data: Any) -> State:
        """The state of the first operation on data."""
        if not is_tensor(data) or not data.dim():
            return None
        sizes = list(data.shape)
        if kind in ("Addmm", "Mm"):
            return Rows(0) if sizes[0] == self._rows else Flat() if sizes[0] % self._rows == 0 else None
        if kind == "Convolution":
            return Rows(0) if sizes[0] == self._rows else None
        at = [place for place, size in enumerate(sizes) if size == self._rows]
        return Rows(at[0]) if len(at) == 1 else None

    def _recurrent(self, node: Any) -> State:
        shape = shape_of(node)
        # On a CPU torch transposes before and after; cuDNN does it itself.
        own = kind_of(node) != "MkldnnRnnLayer"
        axis = 0 if own and getattr(node, "_saved_batch_first", False) else 1
        return Rows(axis) if len(shape) == 3 and shape[axis] == self._rows else None

    def _together(
        self, kind: str, given: Sequence[tuple[Any, State, tuple[int, ...]]], shape: tuple[int, ...]
    ) -> State:
        placed = [
            Rows(state.axis + len(shape) - len(size), state.outer, state.inner)
            for _, state, size in given
            if isinstance(state, Rows)
        ]
        others = [state for _, state, _ in given if isinstance(state, (OneRow, OfAll))]
        if not placed:
            return others[0] if others else Flat()
        for state in others:
            if isinstance(state, OfAll) and kind in ("Div", "Mul"):
                self.found.append(
                    f"values are {'divided by' if kind == 'Div' else 'multiplied with'} the {state.words}"
                )
        first = placed[0]
        for other in placed[1:]:
            if other.axis != first.axis:
                return None
            self._compare(first, other, shape)
        return first if first == placed[-1] else None

    def _compare(self, one: Rows, other: Rows, shape: tuple[int, ...]) -> None:
        # As many times as there are rows: each row with each.
        if (one.outer, one.inner) != (other.outer, other.inner) and one.outer * one.inner != self._rows:
            first, second = (f"{r.outer} x {self._rows} x {r.inner}" for r in (one, other))
            self.found.append(
                f"rows are put together with others: dimension {one.axis} of {shape} runs as {first} in one tensor and as"
                f" {second} in the other (repeat against repeat_interleave, a flatten without a transpose)"
            )

    def _joined(
        self, node: Any, kind: str, given: Sequence[tuple[Any, State, tuple[int, ...]]], shape: tuple[int, ...]
    ) -> State:
        dim = signed(int(node._saved_dim)) % len(shape)
        placed = [state for _, state, _ in given if isinstance(state, Rows)]
        if not placed or len({state.axis for state in placed}) != 1:
            return None
        first = placed[0]
        if kind == "Stack":
            moved = Rows(first.axis + (dim <= first.axis), first.outer, first.inner)
            return moved if len(set(placed)) == 1 else None
        if dim != first.axis:
            for other in placed[1:]:
                self._compare(first, other, shape)
            return first if len(set(placed)) == 1 else None
        plain = len(placed) == len(given) and all(state.outer == state.inner == 1 for state in placed)
        return Rows(dim, len(placed), 1) if plain else None

    def _product(self, kind: str, given: Sequence[tuple[Any, State, tuple[int, ...]]], shape: tuple[int, ...]) -> State:
        factors = given[1:3] if kind in ("Addmm", "Baddbmm") else given[: 3 if kind.startswith("Scaled") else 2]
        states = [state for _, state, _ in factors]
        if kind in ("Addmm", "Mm"):
            left, right = states
            if right is not None:
                return None
            return None if isinstance(left, Rows) and left.axis else left
        rows = [state for state in states if isinstance(state, Rows)]
        if not rows or any(state is not None and not isinstance(state, Rows) for state in states):
            return None
        alike = len(set(rows)) == 1 and rows[0].axis < len(shape) - 2
        return rows[0] if alike else None

    def _alone(self, node: Any, kind: str, state: Rows, before: tuple[int, ...], shape: tuple[int, ...]) -> State:
        """Operations on one tensor with rows."""
        axis = state.axis
        if kind in _VIEWS or kind == "Unsqueeze":
            return self._viewed(state, before, shape)
        if kind == "Expand":
            return Rows(axis + len(shape) - len(before), state.outer, state.inner)
        if kind == "Repeat":
            axis += len(shape) - len(before)
            return Rows(axis, state.outer * int(node._saved_repeats[axis]), state.inner)
        if kind in ("Transpose", "T", "Mt", "Permute"):
            return state._replace(axis=_moved(node, kind, len(shape)).index(axis))
        if kind in _IN_PLACE:
            return state if axis == 0 and shape[:1] == before[:1] else None
        if kind in (*_ALONG, *_TURNING):
            return self._along(node, kind, state, shape)
        if kind in _REDUCING:
            return self._reduced(node, kind, state, before, shape)
        if kind in ("Select", "Unbind"):
            dim = signed(int(node._saved_dim)) % len(before)
            if dim == axis:
                whole = state.outer == state.inner == 1
                words = f"[{signed(int(node._saved_index))}] in dimension {dim} of {before}, which is the batch"
                return OneRow(words) if kind == "Select" and whole else None
            return state._replace(axis=axis - (dim < axis))
        if kind in ("Slice", "Split", "UnsafeSplit", "SplitWithSizes", "Gather", "IndexSelect", "Narrow"):
            return (
                state
                if len(shape) == len(before) and shape[axis] == before[axis] and not _picks(node, kind, axis)
                else None
            )
        return None

    def _viewed(self, state: Rows, before: tuple[int, ...], shape: tuple[int, ...]) -> State:
        """Where the rows are after a view, which keeps the order in memory."""
        outer = math.prod(before[: state.axis]) * state.outer
        inner = math.prod(before[state.axis + 1 :]) * state.inner
        for axis, size in enumerate(shape):
            left, right = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            if left and right and outer % left == 0 and inner % right == 0:
                found = Rows(axis, outer // left, inner // right)
                if found.outer * self._rows * found.inner == size:
                    return found
        if outer > 1 and len(shape) > 1 and shape[0] == self._rows != outer and math.prod(shape[1:]) > 1:
            self.found.append(
                f"a view of {before} as {shape}: {outer} x {self._rows} rows behind each other are no columns, so that each"
                " row gets those of others; cat(..., dim=1), or transpose first"
            )
        return None

    def _along(self, node: Any, kind: str, state: Rows, shape: tuple[int, ...]) -> State:
        dims = node._saved_dims if kind in ("Flip", "Roll") else (node._saved_dim,)
        if state.axis not in {signed(int(dim)) % len(shape) for dim in dims}:
            return state
        if kind in _ALONG:
            self.found.append(f"{_ALONG[kind]} along dimension {state.axis} of {shape}, which is the batch")
        return None

    def _reduced(self, node: Any, kind: str, state: Rows, before: tuple[int, ...], shape: tuple[int, ...]) -> State:
        raw = getattr(node, "_saved_dim", None)
        dims = {
            signed(int(d)) % len(before)
            for d in (raw if isinstance(raw, (tuple, list)) else () if raw is None else (raw,))
        }
        dims = dims or set(range(len(before)))
        if state.axis in dims:
            over = "all values of the batch" if len(dims) == len(before) else "each feature over the rows of the batch"
            return OfAll(f"{_TELLING[kind]} of {over}") if kind in _TELLING else None
        kept = len(shape) == len(before)
        return state if kept else state._replace(axis=state.axis - sum(dim < state.axis for dim in dims))


def _shape(node: Any, index: int) -> tuple[int, ...]:
    metadata = getattr(node, "_input_metadata", None) if node is not None else None
    return tuple(map(int, metadata[index].shape)) if metadata and index < len(metadata) else ()


def _moved(node: Any, kind: str, dims: int) -> list[int]:
    """Which dimension each one of the result was before."""
    order = list(range(dims))
    if kind == "Permute":
        return [signed(int(dim)) % dims for dim in node._saved_dims]
    one, other = (
        (0, 1)
        if kind == "T"
        else (-2, -1)
        if kind == "Mt"
        else (signed(int(node._saved_dim0)), signed(int(node._saved_dim1)))
    )
    if dims > 1:
        order[one % dims], order[other % dims] = order[other % dims], order[one % dims]
    return order


def _picks(node: Any, kind: str, axis: int) -> bool:
    """Whether values are picked along the batch, in whatever order."""
    dim = getattr(node, "_saved_dim", None)
    return kind in ("Gather", "IndexSelect") and dim is not None and signed(int(dim)) % 8 == axis
