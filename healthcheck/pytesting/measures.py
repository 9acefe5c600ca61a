"""Speed and memory of one watched test, for its reference file."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from healthcheck.session import Session

FIRST_STEPS = 0.2
"""Part of the steps that is left out of the speed: warm-up."""


class Measures:
    """Times steps from step end to step end, and follows memory."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._start_memory = 0
        self._peak_memory = 0

    def start(self, session: Session) -> None:
        session.on("train_start", self._training)
        session.on("step_end", self._step)

    def _training(self, event: Any) -> None:
        """Model and optimizer are there, and whatever was imported for them."""
        self._start_memory = _memory()

    def _step(self, event: Any) -> None:
        self._ends.append(perf_counter())
        self._peak_memory = max(self._peak_memory, _memory())

    def values(self, losses: list[float]) -> dict[str, float]:
        """``final_loss``, ``throughput`` (steps per second) and ``peak_memory`` (bytes); what is not known is absent.

        On the CPU memory is what the process has grown by since training began.
        """
        found: dict[str, float] = {}
        if losses:
            found["final_loss"] = statistics.median(losses[-max(1, min(10, len(losses) // 10)) :])
        times = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        times = times[int(len(times) * FIRST_STEPS) :]
        if times:
            found["throughput"] = 1.0 / max(1e-9, statistics.median(times))
        if self._peak_memory:
            found["peak_memory"] = float(max(0, self._peak_memory - (0 if _cuda() else self._start_memory)))
        return found


def machine() -> str:
    """Speed and memory mean something on one kind of machine only."""
    torch = _cuda()
    device = torch.cuda.get_device_name() if torch is not None else f"{platform.machine()} {os.cpu_count()} cores"
    return f"{platform.system()} {device}"


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _memory() -> int:
    """Bytes: of the device where one is in use, else resident memory of this process; 0 if unknown."""
    torch = _cuda()
    if torch is not None:
        return int(torch.cuda.memory_allocated())
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
