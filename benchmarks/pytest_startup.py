"""What the pytest plugin costs a project that does not use it: ``pytest --co`` with and without, in alternating pairs.

    python benchmarks/pytest_startup.py [PAIRS]

Prints the median of the differences in wall time, and in CPU time, which says more on a busy machine. The
limit is 15 ms of wall time for 20 pairs on an idle machine.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 0.015


def once(folder: Path, *options: str) -> tuple[float, float]:
    """Wall and CPU seconds of one ``pytest --co``."""
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without its bytecode every start would compile the plugin anew
    command = [sys.executable, "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider", *options]
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(10):
            (folder / f"test_{number}.py").write_text("".join(f"def test_{i}(): pass\n" for i in range(20)))
        once(folder, "-p", "healthcheck.pytesting.plugin")  # bytecode and disk caches
        once(folder)
        differences = []
        for pair in range(pairs):
            order = [("-p", "healthcheck.pytesting.plugin"), ()]
            times = {options: once(folder, *options) for options in (order if pair % 2 else order[::-1])}
            differences.append([a - b for a, b in zip(times[order[0]], times[order[1]], strict=True)])
    median, cpu = (statistics.median(column) for column in zip(*differences, strict=True))
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"pytest --co, 200 tests, {pairs} pairs, medians with the plugin minus without:")
    print(f"wall {median * 1000:+.1f} ms (limit {LIMIT * 1000:.0f} ms), CPU {cpu * 1000:+.1f} ms")
    return 0 if median <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
