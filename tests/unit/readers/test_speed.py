"""Reading must cost little more than ``json.loads`` of the lines, and no more memory for a longer log."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

from healthcheck.readers.find import read_run


def write_log(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            row = {
                "step": i,
                "loss": 2.0 + i % 7 / 9,
                "learning_rate": 1e-4 + i / 1e9,
                "grad_norm": i % 11 / 7,
                "tokens_per_sec": 1e4 + i % 13,
                "kl": i % 3 / 7,
            }
            file.write(json.dumps(row) + "\n")
    return path


def test_reading_a_row_costs_few_calls(tmp_path: Path) -> None:
    """Counted, not timed: the ratio to ``json.loads`` is measured by ``benchmarks/replay.py``."""
    path = write_log(tmp_path / "log.jsonl", 2_000)
    run = read_run(path)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    batches = run.batches()
    for _ in range(500):  # columns are decided, plans made
        next(batches)
    before = sys.getprofile()
    sys.setprofile(count)
    rows = sum(1 for _ in batches)
    sys.setprofile(before)

    assert rows == 1_500
    assert calls / rows <= 14  # five samples, three generators, one list


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 8_000):
        path = write_log(tmp_path / f"{count}.jsonl", count)
        tracemalloc.start()
        for _ in read_run(path).batches():
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert peaks[1] < 1.2 * peaks[0]
