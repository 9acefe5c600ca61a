"""Reading must cost little more than ``json.loads`` of the lines."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from healthcheck.readers.api import read_run


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


@pytest.mark.slow
def test_reading_a_log_takes_at_most_three_times_its_json(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", 40_000)
    ratios = []
    for _ in range(3):
        start = time.process_time()
        with path.open() as file:
            for line in file:
                json.loads(line)
        parsed = time.process_time() - start
        start = time.process_time()
        count = sum(len(samples) for _, _, samples in read_run(path).batches())
        ratios.append((time.process_time() - start) / parsed)

    assert count == 200_000
    assert min(ratios) <= 3.0


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
