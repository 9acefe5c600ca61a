"""What one sample costs in each condition, and how fast rules load; beside a calibration loop.

    python benchmarks/conditions.py

Times are CPU time of this process per sample, cutting the run out of a list included, best of three. The
calibration loop tells how fast the machine is: compare ratios, not microseconds.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from healthcheck.assembly import plugin_host
from healthcheck.rulelang.compile import load_rules

SAMPLES = 20_000
RUN = 32
CONDITIONS: list[tuple[str, Any]] = [
    ("above", 5),
    ("nonfinite", True),
    ("zscore", {"above": 8, "window": 200}),
    ("robust_z", {"above": 8, "window": 200}),
    ("robust_z", {"above": 8, "window": 200, "log": True, "min_ratio": 1.25}),
    ("robust_z", {"above": 8, "window": 2000}),
    ("ratio", {"above": 2, "window": 200}),
    ("mean", {"above": 3, "window": 200}),
    ("percentile", {"above": 3, "p": 95, "window": 200}),
    ("delta", {"above": 1e9, "over": 10}),
    ("increase", {"above": 1e9, "window": 200}),
    ("slope", {"above": 1, "over": 200}),
    ("slope", {"above": 1, "over": 200, "confidence": 0.95}),
    ("drift", {"above": 50, "window": 100}),
    ("rebound", {"above": 1.05, "sigmas": 6, "fell": "5%"}),
    ("no_improvement", {"over": 1000}),
    ("unchanged", True),
]


def best_of(runs: int, action: Callable[[], None]) -> float:
    """Seconds of CPU time of the fastest run."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def calibrate() -> None:
    total = 0
    for i in range(1_000_000):
        total += i


def main() -> None:
    registry = plugin_host().registry
    draw = random.Random(0)
    values = [2.0 + draw.gauss(0.0, 0.05) for _ in range(SAMPLES)]
    print(f"calibration: a million additions in {best_of(3, calibrate) * 1e3:.0f} ms\n")
    print("us/sample  in runs of 32  condition")
    steps = list(range(SAMPLES))
    for name, options in CONDITIONS:
        compiled = registry.conditions[name].compile(options, {})

        def feed(size: int, compiled: Any = compiled) -> None:
            update, quiet = compiled.start().update, compiled.breaches.healthy
            for at in range(0, SAMPLES, size):
                update(values[at : at + size], steps[at : at + size], quiet)

        times = [best_of(3, functools.partial(feed, size)) / SAMPLES * 1e6 for size in (1, RUN)]
        print(f"{times[0]:9.2f}  {times[1]:13.2f}  {name}{'' if options is True else f': {options}'}")
    rule = "  rule-{}: {{metric: loss, when: {{robust_z: {{above: {}, window: 200}}}}, for: 3 of 5, message: 'loss {{value}}'}}\n"
    for count in (50, 500, 1000):
        text = "version: 1\nrules:\n" + "".join(rule.format(i, 5 + i / 100) for i in range(count))
        print(
            f"{best_of(3, lambda text=text: load_rules(text, registry=registry) and None) * 1e3:9.0f}  ms to load {count} rules"
        )  # type: ignore[misc]


if __name__ == "__main__":
    main()
