"""How fast recorded runs are judged: one long log, and a folder of many small ones.

    python benchmarks/replay.py                    # 200,000 steps, 200 small runs
    python benchmarks/replay.py --steps 1000000 --runs 1000
    python benchmarks/replay.py --json

The long log is JSON lines with five metrics; it is judged by ``healthcheck:recommended``. Processor time is measured, beside what
``json.loads`` alone takes for the same lines, since absolute times depend on the machine. Peak memory is that of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RULES = "healthcheck:recommended"


def write_log(path: Path, steps: int, seed: int = 1) -> None:
    """A loss that falls, a learning-rate warm-up, a gradient norm, throughput and step time."""
    noise = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for i in range(1, steps + 1):
            row = {
                "step": i,
                "loss": round(2 + 3 * math.exp(-i / 20_000) + noise.gauss(0, 0.05), 5),
                "lr": 3e-4 * min(1.0, i / 1000),
                "grad_norm": round(abs(noise.gauss(1, 0.1)), 5),
                "throughput": round(noise.gauss(1000, 10), 2),
                "step_time": round(noise.gauss(0.1, 0.01), 5),
            }
            file.write(json.dumps(row) + "\n")


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def parse_only(path: Path) -> None:
    with path.open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)


def measure(steps: int, runs: int) -> dict[str, float]:
    from healthcheck.cli.replay import Given, judge_of

    given = Given({"rules": [RULES]})
    judge = judge_of(given)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "long.jsonl"
        write_log(log, steps)
        found: dict[str, float] = {"steps": steps, "runs": runs, "rules": len(given.load().rules)}
        found["json.loads"] = min(seconds(lambda: parse_only(log)) for _ in range(2))
        found["reading"] = seconds(lambda: sum(1 for _ in given.read(str(log)).batches()))
        found["replay"] = seconds(lambda: judge(str(log)))
        found["ratio"] = found["replay"] / found["json.loads"]
        found["us_per_step"] = found["replay"] / steps * 1e6
        found["peak_mib"] = _peak(log)
        small = Path(folder) / "small"
        small.mkdir()
        for i in range(runs):
            write_log(small / f"run{i}.jsonl", 200, seed=i)
        paths = sorted(map(str, small.iterdir()))
        found["small: json.loads"] = seconds(lambda: [parse_only(Path(p)) for p in paths])
        found["small: reading"] = seconds(lambda: [sum(1 for _ in given.read(p).batches()) for p in paths])
        found["small: replay"] = seconds(lambda: [judge(p) for p in paths])
    return found


def _peak(log: Path) -> float:
    """Peak memory in MiB of a process that replays the log."""
    done = subprocess.run([sys.executable, __file__, "--only", str(log)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _only(log: str) -> None:
    from healthcheck.cli.replay import Given, judge_of

    judge_of(Given({"rules": [RULES]}))(log)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        _only(args.only)
        return 0
    found = measure(args.steps, args.runs)
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{args.steps:,} steps x 5 metrics, {found['rules']:.0f} rules of {RULES} (processor time)")
    print(f"  json.loads of the lines   {found['json.loads']:7.2f} s")
    print(f"  reading alone             {found['reading']:7.2f} s  {found['reading'] / found['json.loads']:5.1f} x")
    print(
        f"  replay                    {found['replay']:7.2f} s  {found['ratio']:5.1f} x   {found['us_per_step']:.1f} us a step"
    )
    print(f"  peak memory               {found['peak_mib']:7.0f} MiB")
    print(f"{args.runs:,} runs of 200 steps")
    for name in ("json.loads", "reading", "replay"):
        print(f"  {name:<25} {found[f'small: {name}']:7.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
