"""What a profile says: time and memory by operator and module, and what the steps waited for. No torch import."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MODULE = "healthcheck.module:"
"""Annotations that name the module whose forward pass is under way."""
COMPILED = ("Torch-Compiled Region", "CompiledFunction")

MATRIX = re.compile(
    r"gemm|nvjet|xmma|cutlass|wgmma|cublas|conv|winograd|flash|fmha|attention|scaled_mm|::mm$|::addmm|::bmm|::baddbmm|mkldnn_linear"
    r"|::linear$|::matmul$|::einsum$|fft|lstm|gru|rnn",
    re.IGNORECASE,
)
"""Kernels and operators whose time is arithmetic; all others move memory."""
COMMUNICATION = re.compile(
    r"nccl|^gloo:|^c10d::|^_c10d_functional|record_param_comms|all_?reduce|all_?gather|reduce_?scatter|FSDP::all_gather|FSDP::post_backward_reduce",
    re.IGNORECASE,
)
LOADER = re.compile(r"^enumerate\(DataLoader\)")
TO_DEVICE = re.compile(r"^Memcpy ?HtoD|^CopyHostToDevice", re.IGNORECASE)
TO_HOST = re.compile(r"^Memcpy ?DtoH|^CopyDeviceToHost", re.IGNORECASE)
"""Copies over the bus, as CUPTI and ROCm name them: no kernel is at work in them, and no kernel can be made faster."""


@dataclass(slots=True)
class Operator:
    """One operator in one module, over all recorded steps."""

    name: str
    module: str = ""
    calls: int = 0
    self_us: float = 0.0
    """Time on the host without that of the operators that it calls."""
    device_us: float = 0.0
    memory: float = 0.0
    """Bytes allocated less bytes freed, on the device where there is one."""


@dataclass(slots=True)
class Reading:
    """A profile of some steps, read."""

    steps: int = 0
    wall_us: float = 0.0
    """All recorded steps together."""
    operators: list[Operator] = field(default_factory=list)
    """The slowest first."""
    device: bool = False
    """Whether kernels of a device were recorded."""
    matrix_us: float = 0.0
    other_us: float = 0.0
    communication_us: float = 0.0
    """Communication during which nothing else is computed."""
    overlapped_us: float = 0.0
    """Communication behind which something is computed."""
    to_device_us: float = 0.0
    """Copies from the host to the device during which nothing else happens there."""
    to_host_us: float = 0.0
    """The same, from the device to the host."""
    loader_us: float = 0.0
    """The main thread waited in a DataLoader."""
    flops: float = 0.0
    """Of matrix products and convolutions, where shapes were recorded."""
    capable: str = ""
    """Name of the device."""

    @property
    def total_us(self) -> float:
        return sum(o.device_us if self.device else o.self_us for o in self.operators)

    def rows(self, most: int = 10) -> list[dict[str, Any]]:
        """The slowest operators as plain values: times in milliseconds a step, memory in bytes."""
        total, steps = self.total_us or 1.0, self.steps or 1
        rows = []
        for one in self.operators[:most]:
            row: dict[str, Any] = {
                "operator": one.name,
                "module": one.module or "-",
                "share": round((one.device_us if self.device else one.self_us) / total, 4),
                "host_ms": round(one.self_us / 1e3 / steps, 4),
            }
            if self.device:
                row["device_ms"] = round(one.device_us / 1e3 / steps, 4)
            row |= {"memory_bytes": int(one.memory / steps), "calls": round(one.calls / steps, 2)}
            rows.append(row)
        return rows

    def table(self, most: int = 10) -> str:
        """The same as text."""
        rows = self.rows(most)
        if not rows:
            return "no operator was recorded\n"
        titles = list(rows[0])
        cells = [titles, *([str(row[title]) for title in titles] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        what = "device time" if self.device else "host time"
        head = f"{self.steps} steps of {self.wall_us / 1e3 / (self.steps or 1):.3g} ms; by {what} without that of called operators"
        return "\n".join([head, *lines]) + "\n"


def read_profile(events: Sequence[Any], capable: str = "") -> Reading:
    """Sum up the events of one ``torch.profiler`` recording (``profiler.events()``).

    Modules are those of the annotations :data:`MODULE`; an operator of a backward pass belongs to the module of the
    forward operator whose gradient it is (torch gives both one sequence number).
    """
    reading = Reading(capable=capable)
    main = _main_thread(events)
    forward: dict[int, str] = {}
    table: dict[tuple[str, str], Operator] = {}
    kernels: list[tuple[float, float, str]] = []
    hosts: list[tuple[float, float]] = []
    late: list[Any] = []
    for event in events:
        name = event.name
        if _is_device(event):
            if not getattr(event, "is_user_annotation", False) and not name.startswith(("ProfilerStep", MODULE)):
                kernels.append((event.time_range.start, event.time_range.end, name))
            continue
        if name.startswith("ProfilerStep"):
            reading.steps += 1
            reading.wall_us += event.time_range.elapsed_us()
            continue
        if LOADER.match(name):
            if event.thread == main:
                reading.loader_us += event.time_range.elapsed_us()
            continue
        if getattr(event, "is_user_annotation", False) or name.startswith(MODULE):
            if COMMUNICATION.search(name) and name.startswith("gloo"):
                hosts.append((event.time_range.start, event.time_range.end))
            continue
        module = _module(event)
        if module:
            if event.sequence_nr >= 0:
                forward.setdefault(event.sequence_nr, module)
            _add(table, event, module)
        else:
            late.append(event)
        if COMMUNICATION.search(name):
            hosts.append((event.time_range.start, event.time_range.end))
        reading.flops += float(getattr(event, "flops", 0) or 0)
    for event in late:
        _add(table, event, forward.get(_sequence(event), ""))
    reading.device = bool(kernels)
    reading.operators = sorted(table.values(), key=lambda o: -(o.device_us if reading.device else o.self_us))
    if reading.device:
        _device_split(reading, kernels)
    else:
        _host_split(reading, hosts)
    return reading


def _is_device(event: Any) -> bool:
    return str(event.device_type).rpartition(".")[2] != "CPU"


def _main_thread(events: Iterable[Any]) -> int:
    return next(
        (event.thread for event in events if event.name.startswith("ProfilerStep") and not _is_device(event)), 1
    )


def _module(event: Any) -> str:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(MODULE):
            return parent.name[len(MODULE) :] or "(model)"
        parent = parent.cpu_parent
    return ""


def _sequence(event: Any) -> int:
    """That of the autograd node by which an operator was called."""
    while event is not None:
        if event.sequence_nr >= 0 and event.fwd_thread:
            return int(event.sequence_nr)
        event = event.cpu_parent
    return -1


def _add(table: dict[tuple[str, str], Operator], event: Any, module: str) -> None:
    name = event.name.removeprefix("autograd::engine::evaluate_function: ")
    one = table.get((name, module))
    if one is None:
        one = table[name, module] = Operator(name, module)
    one.calls += 1
    one.self_us += event.self_cpu_time_total
    one.device_us += float(getattr(event, "self_device_time_total", 0.0))
    one.memory += float(getattr(event, "self_device_memory_usage", 0) or 0) or float(event.self_cpu_memory_usage or 0)


def _device_split(reading: Reading, kernels: list[tuple[float, float, str]]) -> None:
    spans: dict[str, list[tuple[float, float]]] = {}
    for start, end, name in kernels:
        spans.setdefault(_kind(name), []).append((start, end))
    computing = _union([*spans.get("matrix", ()), *spans.get("other", ())])
    talking = _union(spans.get("communication", ()))
    both = _union([*computing, *talking])
    reading.communication_us = _length(both) - _length(computing)
    reading.overlapped_us = _length(talking) - reading.communication_us
    fetched = _union([*both, *spans.get("to device", ())])
    reading.to_device_us = _length(fetched) - _length(both)
    reading.to_host_us = _length(_union([*fetched, *spans.get("to host", ())])) - _length(fetched)
    # Kernels of several streams overlap: their kinds share the time in which anything is computed.
    matrix, other = (sum(b - a for a, b in spans.get(kind, ())) for kind in ("matrix", "other"))
    busy = _length(computing)
    reading.matrix_us = busy * matrix / ((matrix + other) or 1.0)
    reading.other_us = busy - reading.matrix_us


def _kind(name: str) -> str:
    """What a kernel or copy of a device does, by its name."""
    if COMMUNICATION.search(name):
        return "communication"
    if TO_DEVICE.search(name):
        return "to device"
    if TO_HOST.search(name):
        return "to host"
    return "matrix" if MATRIX.search(name) else "other"


def _host_split(reading: Reading, hosts: list[tuple[float, float]]) -> None:
    for one in reading.operators:
        if COMMUNICATION.search(one.name):
            continue
        if MATRIX.search(one.name):
            reading.matrix_us += one.self_us
        else:
            reading.other_us += one.self_us
    reading.communication_us = _length(_union(hosts))


def _union(ranges: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(ranges: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in ranges)
