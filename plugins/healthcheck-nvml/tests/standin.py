"""A stand-in for the driver and for CUDA: there is no NVIDIA card where these tests run. On a real one:
``benchmarks/on_a_card.py``, which the same readings go through."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return {3: "Not Supported", 4: "Insufficient Permissions", 10: "Timeout", 15: "GPU is lost"}.get(
            self.value, "?"
        )


class Driver:
    """NVML of a machine with some cards; ``readings`` of a card may be changed while a test runs."""

    NVMLError = NVMLError
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_TIMEOUT = 2, 3, 4, 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC = 0, 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_FI_DEV_MEMORY_TEMP = 82
    NVML_VALUE_TYPE_UNSIGNED_INT = 1

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = list(cards)
        self.calls: list[str] = []
        self.xids: list[int] = []
        self.closed = 0

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def _of(self, key: str, value: str) -> dict[str, Any]:
        for card in self.cards:
            if card[key] == value:
                return card
        raise NVMLError(2)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        return self._of("uuid", uuid)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> dict[str, Any]:
        return self._of("pci", address)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: dict[str, Any]) -> dict[str, Any]:
        return self._of("uuid", handle["parent"])

    def _read(self, handle: dict[str, Any], name: str) -> Any:
        self.calls.append(name)
        value = handle["readings"].get(name, NVMLError(3))
        if isinstance(value, Exception):
            raise value
        return value() if callable(value) else value

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return int(self._read(handle, "temperature"))

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return int(self._read(handle, f"clock{kind}"))

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int) -> int:
        return int(self._read(handle, f"max_clock{kind}"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return int(self._read(handle, "reasons"))

    nvmlDeviceGetCurrentClocksThrottleReasons = nvmlDeviceGetCurrentClocksEventReasons

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return int(self._read(handle, "power"))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return int(self._read(handle, "energy"))

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=self._read(handle, "utilization"), memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=self._read(handle, "memory"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self._read(handle, "processes")]

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return int(self._read(handle, f"ecc{kind}"))

    def nvmlEventSetCreate(self) -> object:
        return self

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: object) -> None:
        self._read(handle, "events")

    def nvmlEventSetWait(self, events: object, timeout: int) -> Any:
        if not self.xids:
            raise NVMLError(10)
        return SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlEventSetFree(self, events: object) -> None:
        pass

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[Any]) -> list[Any]:
        def value(field: Any) -> Any:
            found = handle["readings"].get(("field", field))
            known = found is not None
            return SimpleNamespace(nvmlReturn=0 if known else 3, valueType=1, value=SimpleNamespace(uiVal=found))

        return [value(field) for field in fields]


def cuda(*devices: dict[str, Any], current: int = 0) -> Any:
    """torch, as far as the probe asks it: each device with the UUID (without ``GPU-``) and the memory that it holds."""

    def properties(index: int) -> Any:
        device = devices[index]
        domain, bus, slot = device.get("pci", (None, None, None))
        return SimpleNamespace(uuid=device.get("uuid", ""), pci_domain_id=domain, pci_bus_id=bus, pci_device_id=slot)

    module = SimpleNamespace(
        is_available=lambda: bool(devices),
        is_initialized=lambda: True,
        current_device=lambda: current,
        device_count=lambda: len(devices),
        memory_reserved=lambda index: devices[index].get("memory", 1),
        get_device_properties=properties,
    )
    return SimpleNamespace(cuda=module, version=SimpleNamespace(hip=None, cuda="12.8"))


def card(uuid: str, pci: str = "", parent: str = "", **readings: Any) -> dict[str, Any]:
    """One card of the driver. A reading that is not given is not supported."""
    return {"uuid": uuid, "pci": pci, "parent": parent, "readings": readings}


def usual(**changed: Any) -> dict[str, Any]:
    """Readings of a card that is fine and at work."""
    return {
        "temperature": 61, "clock1": 1755, "clock2": 2619, "max_clock1": 1980, "reasons": 0, "power": 512_000,
        "energy": 1_000_000, "utilization": 97, "memory": 40 * 2**30, "processes": [(os.getpid(), 40 * 2**30)],
        "ecc0": 0, "ecc1": 0, "events": 1, **changed,
    }  # fmt: skip
