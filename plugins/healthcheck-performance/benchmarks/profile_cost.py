"""What a scheduled profile costs in the steps before and after it, interleaved with runs that have none.

    python plugins/healthcheck-performance/benchmarks/profile_cost.py [ROUNDS]

Time of the processor in a step (median of the run's steps outside of the profile), which other load hardly touches, and
Python calls a step, which no load touches.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[3])]

import torch

import healthcheck
from healthcheck_performance import Profile
from healthcheck_performance.profiling import profiler_of

STEPS, WAIT = 400, 200


def run(profiled: bool, calls: bool = False) -> tuple[float, float]:
    """Median of the steps before the profile and of those after it: seconds of processor time, or Python calls."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    tools = [Profile(wait=WAIT, active=3)] if profiled else []
    options: dict[str, Any] = {"record": False, "console": False, "plugins": ["healthcheck_performance"]}
    x = torch.randn(64, 256)
    taken = []
    made = 0

    def count(frame: Any, kind: str, argument: Any) -> None:
        nonlocal made
        made += kind == "call"

    with healthcheck.watch(model, optimizer, rules="healthcheck:recommended", callbacks=tools, **options) as health:
        for _ in range(STEPS):
            began = time.process_time()
            before = made
            if calls:
                sys.setprofile(count)
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            health.step(loss=loss)
            sys.setprofile(None)
            taken.append(float(made - before) if calls else time.process_time() - began)
        if profiled:
            assert len(profiler_of(health.session).done) == 1
    # The first steps compile nothing, but fill tables; 8 steps around the profile are its own.
    return statistics.median(taken[50 : WAIT - 2]), statistics.median(taken[WAIT + 40 :])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds of {STEPS} steps, seed 0")
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for profiled in (False, True, True, False):
            found[profiled].append(run(profiled))
    calls = {profiled: run(profiled, calls=True) for profiled in (False, True)}
    print("| Steps | Processor time without a profile | with | Ratio | Python calls without | with |")
    print("|---|---|---|---|---|---|")
    for place, name in enumerate(("before the profile", "after it")):
        without, with_one = (statistics.median(one[place] for one in found[p]) for p in (False, True))
        words = f"{without * 1e3:.3f} ms | {with_one * 1e3:.3f} ms | {with_one / without:.3f}"
        print(f"| {name} | {words} | {calls[False][place]:.0f} | {calls[True][place]:.0f} |")


if __name__ == "__main__":
    main()
