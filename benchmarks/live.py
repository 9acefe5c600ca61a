"""What the live view costs the thread that trains: its processor time with and without ``--live``, in turn.

    python benchmarks/live.py --pairs 6 --steps 1000

A child on a pseudo terminal of its own trains a small model with steps of 20 ms (a sleep), under the recommended rules, and
says at its end how much processor time its main thread has used since the tenth step. The ratio of each pair, and their median.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

SCRIPT = """
import sys, time, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    if step == 10:
        began = time.thread_time()
    x = torch.randn(32, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.02)
open(sys.argv[2], "w").write(str(time.thread_time() - began))
"""


def seconds(folder: Path, steps: int, *, live: bool) -> float:
    """Processor seconds of the training thread of one run."""
    script, result = folder / "train.py", folder / "seconds"
    script.write_text(SCRIPT)
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "healthcheck",
        "run",
        *(["--live"] if live else []),
        str(script),
        str(steps),
        str(result),
    ]
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    os.close(theirs)
    try:
        while os.read(ours, 65536):
            pass
    except OSError:  # the child has closed its terminal
        pass
    os.close(ours)
    child.wait()
    return float(result.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            took = {live: seconds(Path(folder), args.steps, live=live) for live in order}
            ratios.append(took[True] / took[False])
            print(
                f"pair {pair + 1}: off {took[False]:.3f} s, on {took[True]:.3f} s, ratio {ratios[-1]:.3f}", flush=True
            )
    print(f"median ratio {median(ratios):.3f} over {args.pairs} pairs of {args.steps:,} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
