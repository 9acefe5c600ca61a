"""What a child of a watched command costs that does not train: processor time with the folder of our sitecustomize and without.

    python benchmarks/children.py --times 15      # best of so many, alternating

A process without torch may cost 5 ms, one that imports torch and does not train 50 ms (wanted). Processor time of the child, as
the kernel counts it; the best of many, since a busy machine only adds. Also says whether anything of healthcheck was imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

KINDS = {
    "python -c pass": "pass",
    "a pool of two workers": "import multiprocessing as m\nif __name__ == '__main__':\n    m.get_context('spawn').Pool(2).map(abs, range(4))",
    "json, argparse, subprocess": "import json, argparse, subprocess",
    "torch, no training": "import torch; torch.ones(3).sum()",
    "torch, a DataLoader of two spawned workers": "import torch\nif __name__ == '__main__':\n"
    "    rows = torch.utils.data.TensorDataset(torch.ones(8, 2))\n"
    "    list(torch.utils.data.DataLoader(rows, 4, num_workers=2, multiprocessing_context='spawn'))",
}
WANTED = {name: 0.005 if "torch" not in name else 0.05 for name in KINDS}
WANTED["a pool of two workers"] = 0.005 * 4  # two workers and the tracker of their resources
WANTED["torch, a DataLoader of two spawned workers"] = 0.05 * 3


def watched_environment() -> dict[str, str]:
    """What `healthcheck env` says."""
    said = subprocess.run(
        [sys.executable, "-m", "healthcheck", "env", "--json"], capture_output=True, text=True, check=True
    )
    return {**os.environ, **json.loads(said.stdout)}


def processor_time(file: str, environment: dict[str, str]) -> float:
    process = subprocess.Popen([sys.executable, file], env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime  # its own children are within, as far as it waited for them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=15)
    given = parser.parse_args()
    plain, watched = dict(os.environ), watched_environment()
    missed = 0
    print("| child | plain, ms | watched, ms | more, ms | wanted, ms |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in KINDS.items():
            file = os.path.join(folder, "child.py")
            with open(file, "w") as opened:
                opened.write(text)
            best = {"plain": 9.0, "watched": 9.0}
            for _ in range(given.times):
                for kind, environment in (("plain", plain), ("watched", watched)):
                    best[kind] = min(best[kind], processor_time(file, environment))
            more = best["watched"] - best["plain"]
            missed += more > WANTED[name]
            print(
                f"| {name} | {best['plain'] * 1e3:.1f} | {best['watched'] * 1e3:.1f} | {more * 1e3:.1f} | {WANTED[name] * 1e3:.0f} |",
                flush=True,
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
