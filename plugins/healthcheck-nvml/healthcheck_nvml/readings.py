"""What is read of a card, and how readings between two samples become one value.

Each reading stands for itself: one that a card, a driver or a container does not give is not available, and the others go on.
Units and meanings are those of the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from healthcheck import Cost, Metric

from healthcheck_nvml.cards import Card

SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x04, 0x08, 0x20, 0x40, 0x80
"""Bits of nvmlClocksEventReasons: why the clocks are lower than asked for."""
LINK_ERRORS = (161, 162, 163)
"""NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, _RECOVERY and _CRC: counters of one link, which is given as scope."""
LINK_ERROR_TOTALS = (38, 45, 52, 59)
"""CRC of flits and of data, replays and recoveries of all links together: what older drivers have."""
LINK_COUNT = 91
XID_CRITICAL = 0x08
XID_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that a program causes, not the card, be it a neighbour that was killed. As in NVIDIA's k8s-device-plugin."""


class Unavailable(Exception):
    """This card or container does not give a reading, in words."""


@dataclass(slots=True)
class Source:
    """What a reading is taken from: the driver's interface, a card, and what must be kept between readings."""

    nvml: Any
    card: Card
    links: int | None = None
    events: Any = None
    xids: int = 0
    last_xid: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric and how it is read."""

    metric: Metric
    read: Callable[[Source], float]
    fold: str = "mean"
    """What the readings between two samples become: ``mean``, ``max`` or ``last``."""
    since_start: bool = False
    """A counter, of which the first reading is taken off."""
    seldom: bool = False
    """Taken at every tenth round only: it costs the driver more than the others."""


def _temperature(source: Source) -> float:
    nvml, handle = source.nvml, source.card.handle
    try:
        return float(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU))
    except (nvml.NVMLError, AttributeError):  # drivers before 570 have only the older function
        return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))


def _memory_temperature(source: Source) -> float:
    return _field(source, source.nvml.NVML_FI_DEV_MEMORY_TEMP)


def _clock(name: str) -> Callable[[Source], float]:
    def read(source: Source) -> float:
        return float(source.nvml.nvmlDeviceGetClockInfo(source.card.handle, getattr(source.nvml, name)))

    return read


def _clock_share(source: Source) -> float:
    nvml, handle = source.nvml, source.card.handle
    highest = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    if not highest:
        raise Unavailable("the highest clock is not known")
    return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)) / highest


def _held_back(bits: int) -> Callable[[Source], float]:
    def read(source: Source) -> float:
        nvml, handle = source.nvml, source.card.handle
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except (nvml.NVMLError, AttributeError):  # its name before driver 535
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return float(bool(reasons & bits))

    return read


def _power(source: Source) -> float:
    return source.nvml.nvmlDeviceGetPowerUsage(source.card.handle) / 1000.0


def _power_limit(source: Source) -> float:
    return source.nvml.nvmlDeviceGetEnforcedPowerLimit(source.card.handle) / 1000.0


def _energy(source: Source) -> float:
    return source.nvml.nvmlDeviceGetTotalEnergyConsumption(source.card.handle) / 1000.0


def _utilization(name: str) -> Callable[[Source], float]:
    def read(source: Source) -> float:
        return getattr(source.nvml.nvmlDeviceGetUtilizationRates(source.card.handle), name) / 100.0

    return read


def _memory_used(source: Source) -> float:
    return float(source.nvml.nvmlDeviceGetMemoryInfo(source.card.part or source.card.handle).used)


def _memory_others(source: Source) -> float:
    """Of compute processes beside this one. NVML gives the process ids of the host: where this process is not among them (a
    container with ids of its own), nobody can say which of them are others."""
    running = source.nvml.nvmlDeviceGetComputeRunningProcesses(source.card.part or source.card.handle)
    if os.getpid() not in {process.pid for process in running}:
        raise Unavailable("NVML does not list this process (a container with process ids of its own)")
    return float(sum(process.usedGpuMemory or 0 for process in running if process.pid != os.getpid()))


def _ecc(kind: str) -> Callable[[Source], float]:
    def read(source: Source) -> float:
        nvml = source.nvml
        return float(nvml.nvmlDeviceGetTotalEccErrors(source.card.handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC))

    return read


def _remapped(place: int) -> Callable[[Source], float]:
    """Place in what NVML answers: corrected, uncorrected, pending, failed."""

    def read(source: Source) -> float:
        return float(source.nvml.nvmlDeviceGetRemappedRows(source.card.handle)[place])

    return read


def _xid(source: Source) -> float:
    """Critical Xid errors of the card since the first reading; they come as events."""
    nvml = source.nvml
    if source.events is None:
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(source.card.handle, XID_CRITICAL, events)
        source.events = events
    while True:
        try:
            event = nvml.nvmlEventSetWait(source.events, 0)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_TIMEOUT:  # nothing has happened
                return float(source.xids)
            raise
        if int(event.eventData) not in XID_OF_PROGRAMS:
            source.xids += 1
            source.last_xid = int(event.eventData)


def _pcie(source: Source) -> float:
    return float(source.nvml.nvmlDeviceGetPcieReplayCounter(source.card.handle))


def _links(source: Source) -> float:
    """Replays, recoveries and CRC errors of all NVLinks."""
    if source.links is None:
        source.links = int(_field(source, LINK_COUNT))
    if not source.links:
        raise Unavailable("this card has no NVLink")
    wanted: list[Any] = [(counter, link) for link in range(source.links) for counter in LINK_ERRORS]
    for fields in (wanted, list(LINK_ERROR_TOTALS)):
        given = [v for v in source.nvml.nvmlDeviceGetFieldValues(source.card.handle, fields) if not v.nvmlReturn]
        if given:
            return float(sum(_number(source.nvml, value) for value in given))
    raise Unavailable("the driver gives no counters of NVLink errors")


def _field(source: Source, field: int) -> float:
    [value] = source.nvml.nvmlDeviceGetFieldValues(source.card.handle, [field])
    if value.nvmlReturn:
        raise Unavailable(str(source.nvml.NVMLError(value.nvmlReturn)))
    return _number(source.nvml, value)


def _number(nvml: Any, value: Any) -> float:
    """Of a field value, whose type stands beside it."""
    for kind, attribute in (
        ("DOUBLE", "dVal"),
        ("UNSIGNED_INT", "uiVal"),
        ("UNSIGNED_LONG", "ulVal"),
        ("UNSIGNED_LONG_LONG", "ullVal"),
        ("SIGNED_LONG_LONG", "sllVal"),
        ("SIGNED_INT", "siVal"),
    ):
        if value.valueType == getattr(nvml, f"NVML_VALUE_TYPE_{kind}", None):
            return float(getattr(value.value, attribute))
    return float(value.value.ullVal)


def _metric(name: str, help: str, unit: str = "") -> Metric:
    return Metric(f"nvml.{name}", help, unit, Cost.HOST, needs=("an NVIDIA GPU with NVML",))


READINGS: tuple[Reading, ...] = (
    Reading(_metric("temperature", "Temperature of the GPU in degrees Celsius; highest since the last sample."), _temperature, "max"),
    Reading(_metric("memory_temperature", "Temperature of the memory in degrees Celsius; highest since the last sample."), _memory_temperature, "max"),
    Reading(_metric("clock_sm", "Clock of the multiprocessors in MHz."), _clock("NVML_CLOCK_SM")),
    Reading(_metric("clock_memory", "Clock of the memory in MHz."), _clock("NVML_CLOCK_MEM")),
    Reading(_metric("clock_share", "Clock of the multiprocessors divided by the highest one.", "fraction"), _clock_share),
    Reading(_metric("throttled_thermal", "Share of readings with clocks held back for the temperature.", "fraction"), _held_back(SW_THERMAL | HW_THERMAL)),
    Reading(_metric("throttled_hardware", "Share of readings with clocks halved by the hardware (power brake, slowdown).", "fraction"), _held_back(HW_SLOWDOWN | POWER_BRAKE)),
    Reading(_metric("throttled_power", "Share of readings with clocks held back by the power limit: usual under full load.", "fraction"), _held_back(SW_POWER_CAP)),
    Reading(_metric("power", "Power drawn, in watts."), _power),
    Reading(_metric("power_limit", "Power limit in force, in watts."), _power_limit, "last"),
    Reading(_metric("energy", "Energy drawn since the first reading, in joules."), _energy, "last", since_start=True),
    Reading(_metric("utilization", "Share of time in which a kernel ran.", "fraction"), _utilization("gpu")),
    Reading(_metric("memory_utilization", "Share of time in which memory was read or written.", "fraction"), _utilization("memory")),
    Reading(_metric("memory_used", "Memory in use on the card (the MIG instance), by all processes.", "bytes"), _memory_used, "last"),
    Reading(_metric("memory_others", "Memory that other processes hold on the card.", "bytes"), _memory_others, "last"),
    Reading(_metric("ecc_corrected", "Memory errors that ECC corrected, since the first reading."), _ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED"), "last", since_start=True),
    Reading(_metric("ecc_uncorrected", "Memory errors that ECC could not correct, since the first reading."), _ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"), "last", since_start=True),
    Reading(_metric("remap_pending", "1 if rows of memory wait for a reset of the card to be remapped, else 0."), _remapped(2), "last", seldom=True),
    Reading(_metric("remap_failed", "1 if a row of memory could not be remapped, else 0: the card has to be replaced."), _remapped(3), "last", seldom=True),
    Reading(_metric("xid", "Critical Xid errors of the card since the first reading; those that programs cause are left out."), _xid, "last"),
    Reading(_metric("pcie_replays", "PCIe packets that were sent again, since the first reading."), _pcie, "last", since_start=True, seldom=True),
    Reading(_metric("nvlink_errors", "Replays, recoveries and CRC errors of NVLink since the first reading."), _links, "last", since_start=True, seldom=True),
)  # fmt: skip
BY_NAME = {reading.metric.name: reading for reading in READINGS}
