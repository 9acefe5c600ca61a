"""What a run waits for: arithmetic, memory, communication, its host or its data. No torch import.

The steps of a profile are split into those five, and the largest share is the verdict. On a device the time of a step
is the usual one, measured without the profiler, which slows the host down and not the kernels: what no kernel fills is
the host's or the data's, copies of batches to the device are the data's, and those back (``.item()``, ``.cpu()``) the
host's. Kernels are known by their names; arithmetic counts at least the time that its FLOP take at the card's peak,
whatever its kernels are called. (The split of a step and its names follow the "step breakdown" of PyTorch's own profiler and
Mohan et al., 2021, arXiv:2007.06775; achieved against possible arithmetic is the model FLOPs utilization of PaLM,
arXiv:2204.02311.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck_performance.operators import Reading

BOUNDS = ("compute", "memory", "communication", "host", "data")
PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Dense half-precision FLOP/s by a part of the device's name, from the vendor's data sheets."""

ADVICE: Mapping[str, str] = {
    "compute": "the device computes: a lower precision (bfloat16, float8), fused kernels (torch.compile), or more devices are what is left",
    "memory": "operators that move memory take the time: torch.compile fuses them; a larger batch, fused optimizers (fused=True) and "
    "channels_last help; where memory is full, activation checkpointing or CPU offload",
    "communication": "ranks wait for each other: a larger batch or gradient accumulation, prefetching (performance.fsdp), buckets, less "
    "sharding, a faster network",
    "host": 'the device waits for Python: torch.compile or CUDA graphs (mode="reduce-overhead"), a larger batch, no .item() or print in '
    "the loop, fused optimizers",
    "data": "more loader workers, prefetching, pinned memory, cheaper transforms, faster storage",
}
COPIED = (
    "data bound, copies from host to device take most",
    "pin_memory=True and non_blocking=True hide copies behind computation; copy what stays the same once, before the loop; send smaller "
    "types (uint8, bfloat16) and convert on the device; where the copies are offloaded parameters, offload less",
)
READ_BACK = (
    "host bound, copies from device to host take most",
    "copy less from the device in each step: log sums every n steps, keep tensors there, no .cpu() of outputs in the loop",
)
CPU_HOST = "Python between the operators takes the time: torch.compile, a larger batch, no per-sample loops, no .item() in the loop"


@dataclass(slots=True)
class Verdict:
    """Which of :data:`BOUNDS` a run is bound by, and why."""

    bound: str
    share: float
    """Of a step's time, 0 to 1."""
    shares: dict[str, float]
    text: str
    advice: str
    evidence: list[dict[str, Any]] = field(default_factory=list)

    def finding(self) -> dict[str, Any]:
        """As ``performance.findings`` of ``report.json`` takes it."""
        return {
            "text": self.text,
            "value": round(self.share, 4),
            "unit": "fraction",
            "bound": self.bound,
            "share": round(self.share, 4),
            "advice": self.advice,
            "rows": self.evidence,
        }


def analyse(
    reading: Reading, *, usual_step: float | None = None, data_wait: float | None = None, busy: float | None = None
) -> Verdict | None:
    """Split a step and name what it waits for; None where nothing was recorded.

    :param usual_step: seconds of a step without the profiler.
    :param data_wait: seconds that a step waits for its batches, as ``time.data`` measures them.
    :param busy: part of the time that the driver calls the device busy (NVML), for the evidence.
    """
    if not reading.steps or reading.wall_us <= 0:
        return None
    steps = reading.steps
    recorded = reading.wall_us / 1e6 / steps
    loader = reading.loader_us / 1e6 / steps
    wait = max(loader, data_wait or 0.0)
    matrix, other = reading.matrix_us / 1e6 / steps, reading.other_us / 1e6 / steps
    talk = reading.communication_us / 1e6 / steps
    peak = peak_of(reading.capable)
    fetch, read = reading.to_device_us / 1e6 / steps, reading.to_host_us / 1e6 / steps
    if reading.device:
        if peak is not None:  # kernels of unknown names: so much of their time is arithmetic in any case
            least = min(matrix + other, reading.flops / steps / peak)
            matrix, other = max(matrix, least), min(other, matrix + other - least)
        step = min(recorded, usual_step) if usual_step else recorded
        step = max(step, matrix + other + talk + fetch + read)
        idle = step - matrix - other - talk - fetch - read
        data = min(idle, wait)
        host = idle - data + read
        data += fetch
    else:
        step = recorded
        data = min(step, loader)
        host = max(0.0, step - data - matrix - other - talk)
        if data_wait is not None and usual_step:  # a loader of somebody's own is no DataLoader to the profiler
            more = min(host, max(0.0, data_wait / usual_step * step - data))
            data, host = data + more, host - more
    seconds = {"compute": matrix, "memory": other, "communication": talk, "host": host, "data": data}
    whole = sum(seconds.values()) or 1.0
    shares = {name: value / whole for name, value in seconds.items()}
    bound = max(BOUNDS, key=lambda name: shares[name])
    where = reading.capable or ("device" if reading.device else "CPU")
    words, advice = _WORDS[bound], ADVICE[bound]
    if bound == "data" and fetch > data / 2:
        words, advice = COPIED
    elif bound == "host" and read > host / 2:
        words, advice = READ_BACK
    elif bound == "host" and not reading.device:
        advice = CPU_HOST
    text = f"{words}: {shares[bound]:.0%} of a step of {step * 1e3:.3g} ms on {where}"
    evidence: list[dict[str, Any]] = [
        {"part": name, "ms": round(seconds[name] * 1e3, 4), "share": round(shares[name], 4)} for name in BOUNDS
    ]
    if reading.overlapped_us:
        evidence.append(
            {"part": "communication behind computation", "ms": round(reading.overlapped_us / 1e3 / steps, 4)}
        )
    for part, copied in (("copies to the device, in data", fetch), ("copies to the host, in host", read)):
        if copied:
            evidence.append({"part": part, "ms": round(copied * 1e3, 4), "share": round(copied / whole, 4)})
    if reading.flops:
        achieved = reading.flops / steps / step
        row = _rate("achieved TFLOP/s", achieved, peak)
        if peak is not None:
            text += f"; {achieved / 1e12:.3g} TFLOP/s, {achieved / peak:.1%} of what the card can do in half precision"
        evidence.append(row)
        if reading.device and matrix:
            evidence.append(_rate("TFLOP/s while arithmetic runs", reading.flops / steps / matrix, peak))
    if busy is not None:
        evidence.append({"part": "device busy (NVML)", "share": round(busy, 4)})
    return Verdict(bound, shares[bound], shares, text, advice, evidence)


def _rate(part: str, rate: float, peak: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"part": part, "value": round(rate / 1e12, 4)}
    return row if peak is None else row | {"of_peak": round(rate / peak, 4)}


_WORDS = {
    "compute": "compute bound, arithmetic takes most",
    "memory": "memory bound, operators that move memory take most",
    "communication": "communication bound, waiting for other ranks takes most",
    "host": "host bound, Python takes most",
    "data": "data bound, waiting for batches takes most",
}


def peak_of(device: str) -> float | None:
    """Dense half-precision FLOP/s of a card by its name; None where it is not in :data:`PEAKS`."""
    return next((flops for name, flops in PEAKS if name.lower() in device.lower()), None)
