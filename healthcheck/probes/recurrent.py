"""Recurrent layers: the state that one batch leaves to another, and an answer that is read where half of the layer has read one step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.tensors import is_tensor
from healthcheck.probes.activations import Hook, ModuleHooks, out_of_graphs
from healthcheck.probes.graph import all_behind, kind_of, shape_of, signed
from healthcheck.probes.labels import first_few, where_called, where_in_model
from healthcheck.probes.looks import GraphProbe

LOOKS = 6
"""Losses at whose recurrent layers it is looked."""
LAYERS = 8
"""Layers that get a hook at most."""
TWICE = 2
"""Batches in a row that began with the state of the one before, from which on a layer counts."""
_AT_RANDOM = frozenset(("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"))


class CarriedStateProbe:
    """Looks whether recurrent layers begin a batch with the memory that the batch before has left, where a loader draws at random.

    Text that is read on from batch to batch comes in order. Rows that are drawn at random have nothing to do with those that stood
    in their place before. The state is recognised by its memory, which is kept for one step, at the first few losses.
    """

    name = "carried-state"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.carried_state",
            "Recurrent layers that begin batches of a random order with the state that the batch before has left.",
            cost=Cost.HOST,
            needs=("recurrent layers", "a loader that draws at random"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._hooks = ModuleHooks(self._choose)
        self._looks = self._empty = 0
        self._left: dict[str, list[Any]] = {}
        """What each layer has put out in the step at hand: kept, so that its memory is not used for something else."""
        self._before: dict[str, set[int]] = {}
        self._kept: list[Any] = []
        self._row: dict[str, int] = {}
        self._carried: set[str] = set()
        """Layers that were given memory of the step before in the step at hand."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.run is None or event.phase != "train" or self.rests_until == sys.maxsize:
            return ()
        self._hooks.follow(event.model.named_modules())
        if not self._left:
            self._empty += 1
            if self._empty > LOOKS:
                self.rests_until = sys.maxsize  # no such layers
                self.close()
            return ()
        self._looks += 1
        for name in self._left:
            self._row[name] = self._row.get(name, 0) + 1 if name in self._carried else 0
        self._kept = [tensor for tensors in self._left.values() for tensor in tensors]
        self._before = {name: set(map(_memory, tensors)) for name, tensors in self._left.items()}
        self._left, self._carried = {}, set()
        found = [name for name, n in self._row.items() if n >= TWICE]
        if self._looks < LOOKS and not found:
            return ()
        self.close()
        self.rests_until = sys.maxsize
        loaders = [thing for thing in event.run.places.things() if hasattr(thing, "batch_sampler")]
        if not any(_draws_at_random(loader) for loader in loaders) or event.batch is None:
            return ()
        place = where_called(event, "loader") or where_in_model(event, found)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(found)} | place

        return (Sample("layers.carried_state", event.step, float(len(found)), detail=facts if found else None),)

    def close(self) -> None:
        """Take the hooks off."""
        self._hooks.close()
        self._kept, self._left, self._before = [], {}, {}

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterator[tuple[Any, Hook]]:
        from torch import nn

        chosen = [(name or type(m).__name__, m) for name, m in modules if isinstance(m, (nn.RNNBase, nn.RNNCellBase))]
        for name, module in chosen[:LAYERS]:
            yield module, out_of_graphs(self._noting(name))

    def _noting(self, name: str) -> Hook:
        def hook(module: Any, given: Any, output: Any) -> None:
            if not module.training:
                return
            if len(given) > 1 and any(_memory(t) in self._before.get(name, ()) for t in _tensors(given[1])):
                self._carried.add(name)
            # Layers put out (output, state), cells their state alone, that of an LSTM cell in two parts.
            layer = hasattr(module, "num_layers")
            state = output[1] if layer and isinstance(output, tuple) else output
            self._left[name] = [t.detach() for t in _tensors(state)]

        return hook


def _tensors(state: Any) -> list[Any]:
    if is_tensor(state):
        return [state]
    return [t for t in state if is_tensor(t)] if isinstance(state, (tuple, list)) else []


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _draws_at_random(loader: Any) -> bool:
    kinds = {cls.__name__ for cls in type(getattr(loader, "sampler", None)).__mro__}
    return bool(kinds & _AT_RANDOM)


GRAPH_LOOKS = (2, 50)
_ON_THE_WAY = ("Transpose", "Permute", "NativeDropout", "Clone", "Alias", "Contiguous")


class HalfReadProbe(GraphProbe):
    """Looks for ``output[:, -1]`` of a bidirectional layer as the only thing that is read of it.

    At the last step the half that reads backwards has read that one step alone. What it makes of the whole row is in
    ``output[:, 0]``, and in the layer's last state.
    """

    name = "half-read"
    looks_at = GRAPH_LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "layers.half_read",
            "Bidirectional layers of which nothing is read but the last step.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a bidirectional recurrent layer"),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        found = list(half_read(event.loss_graph))
        place = where_called(event, "backward")
        facts = {"which": first_few(dict.fromkeys(found))} | place
        return (Sample("layers.half_read", event.step, float(len(found)), detail=(lambda: facts) if found else None),)


def half_read(root: Any) -> Iterator[str]:
    """Selections of the last step of what two directions have put out, in words."""
    nodes = all_behind(root)
    readers: dict[int, int] = {}
    for node in nodes:
        for parent, _ in node.next_functions:
            if parent is not None:
                readers[id(parent)] = readers.get(id(parent), 0) + 1
    for node in nodes:
        sizes = tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", ())) if kind_of(node) == "Select" else ()
        if len(sizes) != 3:
            continue
        along, index = signed(int(node._saved_dim)) % 3, signed(int(node._saved_index))
        if along > 1 or sizes[along] < 2 or index % sizes[along] != sizes[along] - 1:
            continue
        source = node.next_functions[0][0]
        while _is_on_the_way(source) and readers.get(id(source)) == 1:
            source = source.next_functions[0][0]
        if readers.get(id(source)) != 1 or not _both_directions(source):
            continue
        if any(parent is node and shape_of(reader)[-1:] < shape_of(node)[-1:] and kind_of(reader) in ("Slice", "Split")
               for reader in nodes for parent, _ in reader.next_functions):  # fmt: skip
            continue
        yield f"step {sizes[along] - 1} of {sizes[along]}, of {sizes[2]} features of both directions"


def _is_on_the_way(node: Any) -> bool:
    """Whether this arranges values anew, or drops some: a product with a mask without gradients."""
    return kind_of(node) in _ON_THE_WAY or (
        kind_of(node) == "Mul" and [parent for parent, _ in node.next_functions].count(None) == 1
    )


def _both_directions(node: Any) -> bool:
    """Whether this is what a recurrent layer has read forwards, beside what it has read backwards."""
    if kind_of(node) == "CudnnRnn":
        return bool(node._saved_bidirectional)
    parts = [parent for parent, _ in node.next_functions]
    if kind_of(node) != "Cat" or len(parts) != 2 or None in parts:
        return False
    kinds = [kind_of(part) for part in parts]
    if kinds == ["MkldnnRnnLayer"] * 2:
        return [bool(part._saved_reverse) for part in parts] == [False, True]
    return (
        kinds == ["Stack"] * 2 and _reads(parts[0], -1, -2) and _reads(parts[1], 0, 1) and not _reads(parts[1], -1, -2)
    )


def _reads(stack: Any, one: int, other: int) -> bool:
    """Whether one step of a loop over time was computed from another one."""
    steps = [parent for parent, _ in stack.next_functions]
    if len(steps) < 2:
        return False
    waiting, seen = [steps[one]], list[Any]()
    while waiting and len(seen) < 48:
        node = waiting.pop(0)
        if node is steps[other]:
            return True
        if node is not None and not any(node is known for known in seen):
            seen.append(node)
            waiting += [parent for parent, _ in node.next_functions]
    return False
