"""Give memory back that nobody uses: Python garbage, then cached blocks of the device."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.protocols import ActionContext, Device
from healthcheck.core.text import size_text

DEFAULT_COOLDOWN = 200
"""Steps before a second cleanup. It stalls the device and slows the next allocations, so that
doing it every few steps makes a run slower without freeing more."""

_NOTICEABLE = 2**20


class Cleanup:
    """Collect garbage and empty the allocator's cache; says what that really freed.

    Memory held by live tensors stays: then the outcome says so, and the cure is elsewhere.
    """

    name = "cleanup"
    stage = "mitigate"
    options_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "gc": {"type": "boolean", "description": "Collect Python garbage first (default true)."},
            "empty_cache": {
                "type": "boolean",
                "description": "Return cached device blocks to the driver (default true).",
            },
            "cooldown": {
                "type": "integer",
                "minimum": 0,
                "description": f"Steps before the next cleanup of any rule (default {DEFAULT_COOLDOWN}).",
            },
        },
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self._last_step: int | None = None

    def run(self, alert: Alert, context: ActionContext) -> ActionOutcome:
        cooldown = int(context.options.get("cooldown", DEFAULT_COOLDOWN))
        if self._last_step is not None and context.step - self._last_step < cooldown:
            return ActionOutcome.nothing_done(
                self.name,
                f"the last cleanup was at step {self._last_step:,}, the next is due {cooldown} steps after it",
            )
        device = context.controls.device
        before = _measure(device)
        if context.options.get("gc", True):
            gc.collect()
        if context.options.get("empty_cache", True):
            device.release_cached()
        after = _measure(device)
        self._last_step = context.step
        data = {
            "reserved_before": before[1],
            "reserved_after": after[1],
            "allocated_before": before[0],
            "allocated_after": after[0],
        }
        return ActionOutcome.of(self.name, _words(device.kind, before, after), **data)


def _measure(device: Device) -> tuple[int, int]:
    """``(allocated, reserved)`` in bytes."""
    return device.allocated_bytes(), device.reserved_bytes()


def _words(kind: str, before: tuple[int, int], after: tuple[int, int]) -> str:
    collected = before[0] - after[0]
    returned = before[1] - after[1]
    if kind == "cpu":
        if returned < max(_NOTICEABLE, before[1] // 100):
            return f"cleanup freed {size_text(max(0, returned))} of {size_text(before[1])}: live objects of this process hold it"
        return f"cleanup gave {size_text(returned)} of host memory"
    if returned < max(_NOTICEABLE, before[1] // 100):
        holder = (
            "live tensors hold it, not the cache" if after[0] > after[1] // 2 else "the cache could not be returned"
        )
        return f"cleanup freed {size_text(max(0, returned))} of {size_text(before[1])}: {holder}"
    text = f"released {size_text(returned)} of cached memory"
    if collected >= _NOTICEABLE:
        text += f", {size_text(collected)} of it garbage tensors"
    return text
