"""Device time of our own kernels and copies, measured by events in a step now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

EVERY = 91
"""Steps from one measured step to the next; a number that shares no factor with the usual ``every``."""


class DeviceTime:
    """Time between two events on the current stream of a CUDA or ROCm device, around everything we do at an event.

    Nothing waits: events are read when the device has passed them. Where the device is kept busy this is the time
    of our kernels; where it waits for the host between them, that wait is in it.
    """

    every = EVERY

    def __init__(self) -> None:
        self.steps = 0
        """Steps that were measured."""
        self._seconds = 0.0
        self._open: list[tuple[Any, Any]] = []

    def measures(self) -> bool:
        """Whether a step can be measured now; counts it."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        self.steps += 1
        return True

    def begin(self) -> Callable[[], None] | None:
        """Start; call the result at the end. None while a CUDA graph is captured."""
        torch = sys.modules["torch"]
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream()
        first.record(stream)

        def end() -> None:
            last.record(stream)
            self._open.append((first, last))

        return end

    def seconds_per_step(self) -> float | None:
        """Mean over the measured steps; None while there is none."""
        for first, last in self._open:
            if last.query():
                self._seconds += first.elapsed_time(last) / 1e3
        self._open = []
        return self._seconds / self.steps if self.steps else None
