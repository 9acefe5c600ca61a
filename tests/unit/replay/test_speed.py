"""Replay stays near the cost of parsing, and its memory does not grow with the record.

Judged by rules of the usual kinds; what the whole recommended pack costs is measured by benchmarks/replay.py.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthcheck.cli.replay import Given, judge_of

RULES = """
version: 1
rules:
  loss-nan: {metric: loss, phase: train, when: nonfinite, severity: error}
  grads-nan: {metric: grad_norm, when: nonfinite, only_if: {amp.skipped: 0}, severity: error}
  loss-spike: {metric: loss, phase: train, when: {robust_z: {above: 10, window: 128, min_ratio: 1.25}}, for: 2 of 5}
  grad-spike: {metric: grad_norm, when: {robust_z: {above: 10, window: 128, min_ratio: 2}}, for: 3 of 10}
  lr-zero: {metric: lr, when: {equals: 0}, for: 20}
  slow: {metric: throughput, when: {ratio: {below: 0.5, window: 200}}, for: 20}
"""


def write(path: Path, steps: int) -> Path:
    noise = random.Random(1)
    with path.open("w") as file:
        for i in range(1, steps + 1):
            row = {"step": i, "loss": 2 + 3 * math.exp(-i / 5000) + noise.gauss(0, 0.05), "lr": 3e-4}
            row |= {"grad_norm": abs(noise.gauss(1, 0.1)), "throughput": noise.gauss(1000, 10), "step_time": 0.1}
            file.write(json.dumps(row) + "\n")
    return path


def calls(work: Callable[[], Any]) -> int:
    """Calls of Python functions: the same number on every machine, however busy."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted


def test_a_row_of_a_long_log_costs_few_calls(tmp_path: Path) -> None:
    judge = judge_of(Given({"rules": [RULES]}))
    short, long = write(tmp_path / "short.jsonl", 1_000), write(tmp_path / "long.jsonl", 3_000)
    judge(str(short))  # caches fill once

    a_row = (calls(lambda: judge(str(long))) - calls(lambda: judge(str(short)))) / 2_000

    assert a_row <= 32


def test_memory_does_not_grow_with_the_length_of_a_record(tmp_path: Path) -> None:
    judge = judge_of(Given({"rules": [RULES]}))
    short, long = write(tmp_path / "short.jsonl", 1_000), write(tmp_path / "long.jsonl", 5_000)
    judge(str(short))  # caches fill once
    peaks = []
    for path in (short, long):
        tracemalloc.start()
        judge(str(path))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000, f"peaks in bytes: {peaks}"
