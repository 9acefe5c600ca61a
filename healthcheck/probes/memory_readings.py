"""Memory of the accelerator and of this process, and what it may use at most. Standard library, and torch if it is loaded.

On Linux ``/proc`` is read; elsewhere ``resource`` gives the peak, which callers mention.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 for "no limit"."""


def resident_bytes() -> int | None:
    """Resident memory of this process, children not counted; None where it cannot be read.

    Off Linux this is the peak so far, the only figure the standard library has.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return peak_resident_bytes()


def peak_resident_bytes() -> int | None:
    """Highest resident memory of this process so far."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def waited_for_cpu() -> float:
    """Seconds that this thread was ready to run and had to wait for a processor; 0.0 where Linux does not say so."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def open_files() -> int | None:
    """File descriptors of this process; None where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
    except OSError:
        return None


def physical_bytes() -> int | None:
    """Memory of the machine."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE
    except (AttributeError, ValueError, OSError):
        return None


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")) -> int | None:
    """What this process may use: the smallest cgroup limit above it, else the physical memory.

    Understands cgroup v2 (``memory.max``) and v1 (``memory.limit_in_bytes``), seen from the host
    or from inside a container, where the own group is mounted as the root.
    """
    limits = [limit for limit in _cgroup_limits(root, proc) if limit < _UNLIMITED]
    physical = physical_bytes()
    if physical is not None:
        limits.append(physical)
    return min(limits) if limits else None


def limited_cgroups(
    root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self/cgroup")
) -> list[tuple[str, Path, int]]:
    """The cgroups above this process that have a memory limit: version, folder, limit. They stay those of a process."""
    found = []
    for version, folder in _cgroup_folders(root, proc):
        limit = _read_limit(folder / ("memory.max" if version == "v2" else "memory.limit_in_bytes"))
        if limit is not None and 0 < limit < _UNLIMITED:
            found.append((version, folder, limit))
    return found


def cgroup_memory(groups: Sequence[tuple[str, Path, int]]) -> tuple[int, int] | None:
    """Memory in use and its limit, of that of these cgroups which is nearest to its limit; None without one.

    All processes of the group count: loader workers, and other ranks. Cached files that nobody has touched lately do not: the
    kernel takes them back before it kills anybody.
    """
    found: list[tuple[int, int]] = []
    for version, folder, limit in groups:
        v2 = version == "v2"
        used = _read_limit(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if used is not None:
            cached = _statistic(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
            found.append((max(0, used - cached), limit))
    return max(found, key=lambda pair: pair[0] / pair[1], default=None)


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _cgroup_limits(root: Path, proc: Path) -> list[int]:
    found = []
    for version, folder in _cgroup_folders(root, proc):
        limit = _read_limit(folder / ("memory.max" if version == "v2" else "memory.limit_in_bytes"))
        if limit is not None:
            found.append(limit)
    return found


def _cgroup_folders(root: Path, proc: Path) -> list[tuple[str, Path]]:
    """The groups that this process is in, from its own to the outermost, as ``(v1 or v2, folder)``."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        lines = []
    groups = {("v2", "/"), ("v1", "/")}
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) == 3:
            if parts[0] == "0" and not parts[1]:
                groups.add(("v2", parts[2]))
            elif "memory" in parts[1].split(","):
                groups.add(("v1", parts[2]))
    found = []
    for version, group in groups:
        base = root if version == "v2" else root / "memory"
        folder = base / group.strip("/")
        # Limits of the groups above bind as well.
        while True:
            found.append((version, folder))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


_KNOWN = ("cuda", "mps", "xpu", "hpu", "npu", "cpu")
"""Backends whose allocators are asked. Another one of ``torch.accelerator`` has no data here."""


class TorchDevice:
    """Implements :class:`healthcheck.core.protocols.Device` for whatever torch runs on.

    CUDA and ROCm, then MPS, then XPU, HPU and NPU, else the CPU: resident memory against the memory limit of
    this process. Of another accelerator nothing is known, and no memory is reported. Never initialises a device
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
            used, peak = resident_bytes(), peak_resident_bytes()
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
            return memory_limit_bytes()
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
