"""Which metric exists on which device, derived from how the metrics are declared. No torch."""

from __future__ import annotations

from healthcheck.samples import Cost, Metric

DEVICES = ("CUDA", "ROCm", "MPS", "XPU", "CPU", "other backend")
"""What torch runs on, as the columns of the table; the last stands for backends that nobody here has tried."""

READ_EVERY = 10
"""Steps between two reads on backends where every read is a wait; :class:`healthcheck.probes.transfer.mailbox.HostMailbox`."""
EPOCHS = tuple(f"epoch{part}" for part in ("", "_start", "_end", "_peak", "_delta", "_cleanups", "_began", "_ended"))

_WITH_MAILBOX = ("CUDA", "ROCm")
_MEMORY = {
    "CUDA": ("allocated", "reserved", "peak", "retries"),
    "ROCm": ("allocated", "reserved", "peak", "retries"),
    "MPS": ("allocated", "reserved"),
    "XPU": ("allocated", "reserved", "peak"),
    "CPU": ("allocated", "peak"),
    "other backend": (),
}
"""Allocator counters that :class:`healthcheck.probes.memory.device.TorchDevice` can read."""
_MADE_OF = {
    "memory.fraction": "allocated",
    "memory.fragmentation": "reserved",
    "memory.epoch_floor": "allocated",
    "memory.time_left": "allocated",
    "memory.at": "allocated",
    "memory.step_growth": "allocated",
    **{f"memory.{name}": "allocated" for name in EPOCHS},
}


def availability(metric: Metric, device: str) -> str:
    """``late``: every step, one or two steps late, no wait. ``yes``: at once. ``every 10``: read in one step of ten,
    each read a wait for the device. ``approximate``: of the process instead of the device. ``no data``: not there, and rules on it
    are reported as not judged.
    """
    name = metric.name
    if name.startswith("memory.") and not name.startswith(("memory.host", "memory.live")):
        counter = _MADE_OF.get(name, name.partition(".")[2])
        if counter not in _MEMORY[device]:
            return "no data"
        return "approximate" if device == "CPU" else "yes"
    if "cuda" in metric.needs and device not in _WITH_MAILBOX:
        return "no data"
    if metric.cost is Cost.DEVICE and device != "CPU":
        return "late" if device in _WITH_MAILBOX else f"every {READ_EVERY}"
    return "yes"
