"""A training that ends because memory ran out: what held it, when it had grown, and where it was asked for.

Nothing is measured while there is enough, but for one walk over the graph of an early loss: which layers keep how much for their
backward pass.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.core.text import size_text
from healthcheck.device.tensors import GRADIENT, is_tensor, local_part, no_grad, on_host
from healthcheck.probes.graph import all_behind, kind_of, saved
from healthcheck.probes.looks import LOOK_SETTLED, next_look
from healthcheck.probes.memory_readings import TorchDevice, memory_limit_bytes, resident_bytes

WALKED_AT = 2
"""The step whose graph is walked."""
APART = 10
"""Steps from one reading of memory to the next, at first."""
READINGS = 8
"""Last readings of memory that are shown."""
FRAGMENTED = 0.15
"""Part of the device that is reserved and not in use, from which the allocator is named."""
_RAW = "_raw_saved_"
_ASKED = re.compile(r"(?:[Tt]ried to allocate|you tried to allocate) ([\d.]+ ?(?:[KMGT]i?B|bytes))")
_HOST = re.compile(r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory", re.IGNORECASE)


class OutOfMemoryProbe:
    """Adds up what is known to be held, at the exception that memory has run out."""

    name = "out-of-memory"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.LOSS, EventKind.STEP_END, EventKind.EXCEPTION)
    noted = (EventKind.STEP_END,)
    rests_always = True
    provides: tuple[Metric, ...] = (
        Metric(
            "oom.activations",
            "Bytes of the device beside weights, gradients and optimizer state when it ran out of memory, where they are most of it.",
            "bytes",
            Cost.HOST,
            needs=("an out-of-memory error",),
        ),
        Metric(
            "oom.state",
            "Bytes of weights, gradients and optimizer state when a device ran out of memory, where they are most of it.",
            "bytes",
            Cost.HOST,
            needs=("an out-of-memory error",),
        ),
        Metric(
            "oom.fragmentation",
            f"Bytes that the allocator held and did not use when a device ran out of memory, from {FRAGMENTED:.0%} of it.",
            "bytes",
            Cost.HOST,
            needs=("an out-of-memory error",),
        ),
        Metric(
            "oom.host",
            "Bytes that this process held when the host had no memory left for it.",
            "bytes",
            Cost.HOST,
            needs=("an out-of-memory error",),
        ),
    )

    def __init__(self, device: TorchDevice | None = None) -> None:
        self.device = device or TorchDevice()
        self.rests_until = self.events_from = 0
        self._walked = False
        self._read_from = 0
        """The step of the next reading."""
        self._model: ModelView | None = None
        self._layers: list[tuple[str, int]] = []
        self._kept = 0
        self._readings: deque[tuple[int, int]] = deque(maxlen=READINGS)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is not None:
            self._model = event.model
        if event.kind is EventKind.EXCEPTION:
            return self._report(event)
        if event.kind is EventKind.LOSS and event.step >= WALKED_AT and not self._walked:
            self._walked, self.events_from = True, sys.maxsize
            if event.loss_graph is not None and event.model is not None:
                with no_grad():
                    self._layers, self._kept = kept_by_layer(event.loss_graph, event.model)
        elif event.kind is EventKind.STEP_END:
            self._read(event.step)
            if self._walked:
                self.rests_until = self._read_from
        return ()

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        if rows[-1].over:
            self._read(rows[-1].step)
        return ()

    def _read(self, step: int) -> None:
        if step < self._read_from:
            return
        self._read_from = next_look(step, APART, LOOK_SETTLED)
        used = self.device.statistics().get("allocated")
        if used is not None:
            self._readings.append((step, used))

    # -- the report ---------------------------------------------------------------------

    def _report(self, event: Event) -> Iterable[Sample]:
        error = event.exception
        if error is None or not ran_out(error):
            return ()
        host = isinstance(error, MemoryError) or bool(_HOST.search(str(error)))
        held = held_by(self._model)
        known = sum(held.values())
        statistics = {} if host else self.device.statistics()
        used = statistics.get("allocated", 0)
        reserved = statistics.get("reserved", used)
        capacity = None if host else self.device.capacity_bytes()
        facts: dict[str, Any] = {}
        asked = _ASKED.search(str(error))
        if asked:
            facts["asked"] = f"for {asked[1]} more"
        if place := where(error):
            facts["where"] = place
        if module := module_at(error, self._model):
            facts["module"] = module
        if host:
            value, metric = float(resident_bytes() or 1), "oom.host"
            limit = memory_limit_bytes()
            facts["held"] = f"{size_text(value)}" + (f" of {size_text(limit)}" if limit else "")
        else:
            rest = max(0, used - known)
            idle = max(0, reserved - used)
            if capacity and idle > FRAGMENTED * capacity:
                value, metric = float(idle), "oom.fragmentation"
            elif rest >= known:
                value, metric = float(max(1, rest)), "oom.activations"
            else:
                value, metric = float(max(1, known)), "oom.state"
            held["activations and others"] = rest
            if idle:
                held["reserved, not in use"] = idle
        facts["holders"] = ", ".join(
            f"{name} {size_text(size)}" for name, size in sorted(held.items(), key=lambda item: -item[1]) if size
        )
        if self._layers:
            facts["kept for backward"] = f"{size_text(self._kept)} at step {WALKED_AT}, most by " + ", ".join(
                f"{name} {size_text(size)}" for name, size in self._layers[:4]
            )
        if self._readings:
            facts["before"] = ", ".join(
                f"{size_text(used)} at step {step:,}" for step, used in list(self._readings)[-4:]
            )
        return (Sample(metric, event.step, value, detail=lambda: facts),)


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that a device or the host had no memory left."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return isinstance(error, RuntimeError) and bool(_HOST.search(str(error)) or "out of memory" in str(error).lower())


def held_by(model: ModelView | None) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, each storage once."""
    if model is None:
        return {}
    seen: set[Any] = set()
    params = [p for _, p in model.named_parameters()]
    states = [value for o in model.optimizers() for s in o.state.values() for value in _tensors(s)]
    return {
        "weights": _bytes(params, seen),
        "gradients": _bytes([g for g in map(GRADIENT, params) if g is not None], seen),
        "optimizer state": _bytes(states, seen),
    }


def _tensors(state: Any) -> list[Any]:
    return [value for value in state.values() if is_tensor(value)] if isinstance(state, Mapping) else []


def _bytes(tensors: Iterable[Any], seen: set[Any]) -> int:
    total = 0
    for tensor in tensors:
        try:
            storage = local_part(tensor).untyped_storage()
            key = storage.data_ptr(), str(storage.device)
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            continue
    return total


def kept_by_layer(root: Any, model: ModelView) -> tuple[list[tuple[str, int]], int]:
    """Bytes that the graph of a loss keeps for its backward pass: by layer, most first, and of all together.

    A tensor belongs to the layer whose parameters its node uses, else to the next such node behind it.
    """
    owner = {id(p): name.rpartition(".")[0] or name for name, p in model.named_parameters()}
    weights = {p.untyped_storage().data_ptr() for _, p in model.named_parameters() if not hasattr(p, "to_local")}
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    layer_of: dict[int, str] = {}
    total = 0
    for node in all_behind(root):
        layer = ""
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            if kind_of(parent) == "AccumulateGrad":
                layer = owner.get(id(parent.variable), "") or layer
            else:
                layer = layer or layer_of.get(id(parent), "")
        layer_of[id(node)] = layer
        for tensor in _saved_tensors(node):
            if not is_tensor(tensor) or hasattr(tensor, "to_local"):
                continue
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:  # sparse
                continue
            address = storage.data_ptr()
            if address in seen or address in weights or (on_host(tensor) and not storage.nbytes()):
                continue
            seen.add(address)
            total += storage.nbytes()
            name = layer or kind_of(node)
            sizes[name] = sizes.get(name, 0) + storage.nbytes()
    return sorted(sizes.items(), key=lambda item: -item[1]), total


def _saved_tensors(node: Any) -> Iterable[Any]:
    """Those that can be read at no price: what activation checkpointing left out is not calculated anew."""
    for name in dir(node):
        if name.startswith(_RAW):
            try:
                found = saved(node, name[len(_RAW) :])
            except RuntimeError:  # freed already
                continue
            yield from found if isinstance(found, (list, tuple)) else (found,)


def where(error: BaseException) -> str:
    """The innermost line of the user's own code: ``train.py:31``."""
    place = ""
    for frame, line in _frames(error):
        path = frame.f_code.co_filename
        if (
            not path.startswith("<")
            and "site-packages" not in path
            and "/torch/" not in path
            and "healthcheck" not in path
        ):
            place = f"{Path(path).name}:{line}"
    return place


def module_at(error: BaseException, model: ModelView | None) -> str:
    """The innermost module of the model whose forward pass was under way."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
    found = ""
    for frame, _ in _frames(error):
        name = names.get(id(frame.f_locals.get("self")))
        if name:
            found = name
    return found


def _frames(error: BaseException) -> Iterable[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
