"""Processor time of whole runs, with ``healthcheck run`` and without, side by side.

    python benchmarks/cpu_time.py                       steps of 0.25 ms, 100,000 of them
    python benchmarks/cpu_time.py gan.py mlp.py         scripts of your own
    python benchmarks/cpu_time.py --off gan.py          every step watched: overhead_budget off

Runs alternate, the best of three (``--times``) counts: time that processes really ran, whoever else is at work on the machine.
torch's second thread spins while the first one runs Python: without ``OMP_NUM_THREADS=1`` every microsecond counts twice, the
script's and ours.
Wanted: at most 1.02 times plain python and 3 seconds: start-up, the allowance of two seconds, and the budget.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

FACTOR, SECONDS = 1.02, 3.0

SHORT_STEPS = """
import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    inputs = torch.randn(16, 16)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def processor_time(command: list[str], folder: str) -> float:
    """User and system time of a process and its children. Raises ``RuntimeError`` if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: a rule has failed the run, which took its time all the same
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(name: str, script: list[str], times: int, rules: list[str]) -> tuple[float, float]:
    """Best times without and with us. Prints a row."""
    without, with_us = [], []
    for _ in range(times):
        for found, start in ((without, []), (with_us, ["-m", "healthcheck", "run", "--observe", *rules])):
            with tempfile.TemporaryDirectory() as folder:
                found.append(processor_time([sys.executable, *start, *script], folder))
    plain, watched = min(without), min(with_us)
    allowed = FACTOR * plain + SECONDS
    verdict = "met" if watched <= allowed else "MISSED"
    print(f"| {name} | {plain:.2f} | {watched:.2f} | {watched / plain:.3f} | {allowed:.2f} | {verdict} |", flush=True)
    return plain, watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help="instead of the short steps")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000, help="of the short ones")
    parser.add_argument("--off", action="store_true", help="overhead_budget: off")
    args = parser.parse_args()
    print(f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}\n")
    print("| script | python, s | healthcheck run, s | times | at most | |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rules: list[str] = []
        if args.off:
            file = Path(folder, "off.yaml")
            file.write_text(
                'version: 1\nextends: ["healthcheck:recommended"]\nsettings: {overhead_budget: off}\n', encoding="utf-8"
            )
            rules = ["--rules", str(file)]
        if args.scripts:
            for given in args.scripts:
                measure(Path(given).name, [str(Path(given).resolve())], args.times, rules)
            return
        script = Path(folder, "short.py")
        script.write_text(SHORT_STEPS, encoding="utf-8")
        measure(f"{args.steps:,} short steps", [str(script), str(args.steps)], args.times, rules)


if __name__ == "__main__":
    main()
