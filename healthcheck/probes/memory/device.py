"""Memory of the accelerator, or of the process where there is none."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from healthcheck.probes.memory import host

_KNOWN = ("cuda", "mps", "xpu", "hpu", "npu", "cpu")
"""Backends whose allocators are asked. Another one of ``torch.accelerator`` has no data here."""


class TorchDevice:
    """Implements :class:`healthcheck.protocols.Device` for whatever torch runs on.

    CUDA and ROCm, then MPS, then XPU, HPU and NPU, else the CPU: resident memory against the memory limit of
    this process. Of another accelerator nothing is known, and no memory is told. Never initialises a device
    that the script has not used, and never imports torch.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self._capacity: dict[str, int | None] = {}

    @property
    def kind(self) -> str:
        """``cuda``, ``mps``, the name of another accelerator, or ``cpu``; may change once a device is used."""
        torch = sys.modules.get("torch")
        if torch is None:
            return "cpu"
        with contextlib.suppress(AttributeError, RuntimeError):
            if torch.cuda.is_initialized():
                return "cuda"
        with contextlib.suppress(AttributeError, RuntimeError):
            if torch.backends.mps.is_available():
                return "mps"
        with contextlib.suppress(AttributeError, RuntimeError):
            for name in ("xpu", "hpu", "npu"):
                module = getattr(torch, name, None)
                if module is not None and module.is_initialized():
                    return name
        with contextlib.suppress(AttributeError, RuntimeError):
            other = torch.accelerator.current_accelerator()
            if other is not None and other.type not in _KNOWN:
                return str(other.type)
        return "cpu"

    def statistics(self) -> dict[str, int]:
        """``allocated``, ``reserved``, ``peak``, ``retries`` as far as the backend knows them.

        One call to the allocator; no synchronisation.
        """
        kind = self.kind
        if kind == "cpu":
            used, peak = host.resident_bytes(), host.peak_resident_bytes()
            if used is None:
                return {}
            # The kernel notes the peak now and then only; it can lag behind what is there now.
            return {"allocated": used, "peak": max(used, peak or 0)}
        torch = sys.modules["torch"]
        if kind == "mps":
            return {
                "allocated": int(torch.mps.current_allocated_memory()),
                "reserved": int(torch.mps.driver_allocated_memory()),
            }
        module: Any = getattr(torch, kind, None)
        if kind == "cuda":
            stats = torch.cuda.memory.memory_stats_as_nested_dict(self._index)
            if not stats:
                return {}
            return {
                "allocated": stats["allocated_bytes"]["all"]["current"],
                "reserved": stats["reserved_bytes"]["all"]["current"],
                "peak": stats["allocated_bytes"]["all"]["peak"],
                "retries": stats.get("num_alloc_retries", 0),
            }
        if kind not in _KNOWN:  # what the process holds on the host says nothing of such a device
            return {}
        return {
            "allocated": int(module.memory_allocated(self._index)),
            "reserved": int(module.memory_reserved(self._index)),
            "peak": int(module.max_memory_allocated(self._index)),
        }

    def allocated_bytes(self) -> int:
        """Memory held by live tensors; resident memory of the process on the CPU."""
        return int(self.statistics().get("allocated", 0))

    def reserved_bytes(self) -> int:
        """Memory taken from the driver, cached blocks included; as ``allocated_bytes`` on the CPU."""
        stats = self.statistics()
        return int(stats.get("reserved", stats.get("allocated", 0)))

    def capacity_bytes(self) -> int | None:
        """All the memory that this process could use, or None if the backend does not say."""
        kind = self.kind
        if kind not in self._capacity:
            self._capacity[kind] = self._ask_capacity(kind)
        return self._capacity[kind]

    def _ask_capacity(self, kind: str) -> int | None:
        if kind == "cpu":
            return host.memory_limit_bytes()
        torch = sys.modules["torch"]
        if kind == "mps":
            return int(torch.mps.recommended_max_memory())
        module: Any = getattr(torch, kind, None)
        try:
            index = module.current_device() if self._index is None else self._index
            return int(module.get_device_properties(index).total_memory)
        except (AttributeError, RuntimeError):
            return None

    def release_cached(self) -> None:
        """Give cached blocks back to the driver. Stalls the device; on the CPU, trim the C heap."""
        kind = self.kind
        if kind == "cpu":
            _trim_heap()
            return
        empty_cache = getattr(getattr(sys.modules["torch"], kind, None), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def _trim_heap() -> None:
    """Ask glibc to return free pages; other C libraries do so on their own or not at all."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
