"""Which cards this process trains on, in NVML's words.

NVML counts all cards of the machine in the order of the PCI bus; CUDA counts those that ``CUDA_VISIBLE_DEVICES`` leaves, in
another order where `CUDA_DEVICE_ORDER` says so. The two are matched by UUID, else by PCI address, never by index.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class NotHere(Exception):
    """Why nothing can be read in this process, in words for a report."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card that is trained on."""

    index: int
    """Of CUDA in this process."""
    handle: Any
    """NVML's handle of the whole card: it has the temperature, the clocks, the power."""
    part: Any = None
    """NVML's handle of the MIG instance, where the process has a part of the card only: it has its own memory."""


def framework() -> Any:
    """The torch that the script has imported; None where it has none. Importing it is not our business."""
    return sys.modules.get("torch")


def used(torch: Any) -> list[int]:
    """CUDA's indexes of the devices on which this process holds memory, the current one first."""
    if getattr(torch.version, "hip", None):
        raise NotHere("this torch is built for ROCm; NVML is for NVIDIA cards")
    cuda = torch.cuda
    if not getattr(torch.version, "cuda", None) or not cuda.is_available():
        raise NotHere("no NVIDIA GPU in use")
    if not cuda.is_initialized():
        raise NotHere("this process has not used CUDA")
    current = int(cuda.current_device())
    holding = [index for index in range(cuda.device_count()) if index != current and cuda.memory_reserved(index)]
    return [current, *holding] if cuda.memory_reserved(current) or not holding else holding


def find(nvml: Any, torch: Any, index: int) -> Card:
    """The card of a CUDA device. Raises ``NotHere`` if NVML has none with its UUID or PCI address."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", "") or "")
    for name in _uuids(uuid):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
        if name.startswith("MIG-"):
            return Card(index, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), handle)
        return Card(index, handle)
    address = pci_address(properties)
    if address:
        try:
            return Card(index, nvml.nvmlDeviceGetHandleByPciBusId(address))
        except nvml.NVMLError:
            pass
    raise NotHere(f"NVML does not show CUDA device {index} ({uuid or 'without UUID'}, PCI {address or 'unknown'})")


def _uuids(uuid: str) -> Iterator[str]:
    """How NVML may call what CUDA calls so: a MIG instance has a UUID of its own."""
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    if bare.strip("0-"):
        yield f"MIG-{bare}"
        yield f"GPU-{bare}"


def pci_address(properties: Any) -> str:
    """``00000000:1B:00.0``; empty where torch does not say it."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(not isinstance(part, int) for part in parts):
        return ""
    domain, bus, device = parts
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"
