"""Memory of this process and what it may use at most. Standard library only.

Linux reads ``/proc``; elsewhere ``resource`` gives the peak, which is said where it is used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


def _cgroup_limits(root: Path, proc: Path) -> list[int]:
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
        name = "memory.max" if version == "v2" else "memory.limit_in_bytes"
        folder = base / group.strip("/")
        while True:
            limit = _read_limit(folder / name)
            if limit is not None:
                found.append(limit)
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
