"""How fast a run was, what a step's time went to and what it waited for: ``performance`` of ``report.json``.

Made once, at the end, of what was measured anyway: nothing is timed for it. What nobody measured is absent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.core.protocols import Controls, Device

PARTS = ("data", "forward", "backward", "optimizer")
"""Parts of a step that have a metric ``time.PART``; what is left of ``time.step`` is ``other``."""
FEWEST = 10
"""Steps with a time from which on something is said of the usual step."""
WAITS = 0.3
"""Share of the time that steps wait for their batch from which on the loader is what holds the run up."""
RECOMPILES = 0.2
"""Share of the time that went into compiling from which on it is said."""

Recent = Callable[[str], list[tuple[int, float]]]
"""The last values of a series as (step, value), oldest first."""


class Performance:
    """What is said of one run's speed; made at its start, since a process may train more than once."""

    def __init__(self) -> None:
        self._compiled_before = _compile_seconds()

    def add(
        self,
        report: dict[str, Any] | None,
        recent: Recent,
        active: float,
        controls: Controls | None,
        ask: Callable[[dict[str, Any]], None],
    ) -> None:
        """Write ``performance`` into a report: facts, our own findings, those of plugins, and what explains most.

        :param active: seconds of training, without evaluations, checkpoints and the like.
        :param controls: of the trainer, for the memory of its device.
        :param ask: lets plugins add to ``findings``.
        """
        if report is None:
            return
        made = int(report["steps"]) - int(report.get("resumed_from", 0))
        found: dict[str, Any] = {"seconds": report["seconds"], "training_seconds": round(active, 3), "steps": made}
        if made > 0 and active > 0:
            found["steps_per_second"] = _short(made / active)
        if rate := _mean(recent("throughput")):
            # Where the size of a batch is unknown, that metric counts steps.
            steps_only = math.isclose(rate, _mean(recent("time.step"), inverse=True), rel_tol=1e-3)
            found |= {} if steps_only else {"samples_per_second": _short(rate)}
        if rate := _mean(recent("tokens_per_sec")):
            found["tokens_per_second"] = _short(rate)
        if split := _split(recent):
            found["step"] = split
        if controls is not None and controls.device is not None and (memory := _memory(controls.device)):
            found["memory"] = memory
        # torch._dynamo.reset() forgets the times before it.
        if (compiled := _compile_seconds() - self._compiled_before) > 0:
            found["compile_seconds"] = _short(compiled)
        found["findings"] = _findings(found)
        report["performance"] = found
        ask(found)
        if (reached := verdict(found)) is not None:
            found["verdict"] = reached


def verdict(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What holds the run up, by the finding that explains most of a step's time; None where none says so."""
    bound = {
        name: finding
        for name, finding in found.get("findings", {}).items()
        if finding.get("bound") and isinstance(finding.get("share"), (int, float))
    }
    if not bound:
        return None
    name = max(bound, key=lambda name: bound[name]["share"])
    reached = {key: bound[name][key] for key in ("bound", "share", "text", "advice") if key in bound[name]}
    return {**reached, "finding": name}


def _split(recent: Recent) -> dict[str, Any]:
    """Mean seconds of the last steps and of their parts, as far as those were measured."""
    whole = dict(recent("time.step"))
    whole = {step: value for step, value in whole.items() if math.isfinite(value)}
    if len(whole) < FEWEST:
        return {}
    mean = sum(whole.values()) / len(whole)
    found: dict[str, Any] = {"seconds": _short(mean), "of_last": len(whole)}
    known = 0.0
    for part in PARTS:
        # Only steps that have both times: a first step has parts, and no whole.
        values = [value for step, value in recent(f"time.{part}") if step in whole and math.isfinite(value)]
        if values:
            found[part] = _short(sum(values) / len(values))
            known += sum(values) / len(values)
    if known:
        found["other"] = _short(max(0.0, mean - known))
    return found


def _memory(device: Device) -> dict[str, Any]:
    """Peak and capacity in bytes."""
    statistics = getattr(device, "statistics", None)
    peak = statistics().get("peak") if statistics is not None else None
    capacity = getattr(device, "capacity_bytes", lambda: None)()
    found: dict[str, Any] = {"device": device.kind}
    if peak:
        found["peak_bytes"] = int(peak)
    if capacity:
        found["capacity_bytes"] = int(capacity)
    return found if len(found) > 1 else {}


def _compile_seconds() -> float:
    """Seconds that Dynamo has spent compiling in this process; 0.0 where nothing was compiled. Never loads it."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = getattr(utils, "compilation_time_metrics", None) or {}
    try:
        return float(sum(times.get("_compile.compile_inner", ())))
    except (TypeError, ValueError, AttributeError):  # no public interface: another torch may keep something else there
        return 0.0


def _findings(found: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said without a profiler."""
    made: dict[str, Any] = {}
    step = found.get("step", {})
    if "data" in step and step["seconds"] > 0:
        share = min(1.0, step["data"] / step["seconds"])
        waits = f"steps wait {share:.0%} of their time for their batch"
        made["data-wait"] = {"text": waits, "value": round(share, 4), "unit": "fraction", "from": "healthcheck"}
        if share >= WAITS:
            advice = "more loader workers, prefetching, pinned memory, cheaper transforms, faster storage"
            made["data-wait"] |= {"bound": "data", "share": round(share, 4), "advice": advice}
    compiled, active = found.get("compile_seconds", 0.0), found["training_seconds"]
    if compiled and active and compiled / active >= RECOMPILES:
        made["compile-time"] = {
            "text": f"{min(1.0, compiled / active):.0%} of the training time went into torch.compile",
            "value": compiled,
            "unit": "s",
            "advice": "a longer run spreads it; torch.compile(dynamic=True) where shapes change keeps it from coming back",
            "from": "healthcheck",
        }
    return made


def _mean(values: list[tuple[int, float]], *, inverse: bool = False) -> float:
    """Of the finite values, or of one by each of them; 0.0 without any."""
    finite = [1 / value if inverse else value for _, value in values if math.isfinite(value) and value > 0]
    return sum(finite) / len(finite) if finite else 0.0


def _short(value: float) -> float:
    """Six digits: nobody reads more of a measured time."""
    return float(f"{value:.6g}")
