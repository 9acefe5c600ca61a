"""On a real NVIDIA card: do the readings move under load, and what does reading once a second cost?

    python plugins/healthcheck-nvml/benchmarks/on_a_card.py            # about 100 seconds
    python plugins/healthcheck-nvml/benchmarks/on_a_card.py --blocks 6 --seconds 0.5   # a quick look

Needs torch with CUDA, healthcheck, and nvidia-ml-py. Three parts, each of which ends the script with 1 if it fails:

1. every reading that this card gives, at rest and after some seconds of matrix products: power, clock and utilisation must be higher;
2. the whole way: a loop under ``watch()`` with rules on ``nvml.*`` and the pack, whose samples must be in the session;
3. training steps with the thread at 1 Hz and without it, in interleaved pairs of blocks: the geometric mean of the ratios of
   their mean step times, with its 95 % interval (Student, over pairs), must contain 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the plugin is not installed

import healthcheck
import torch

from healthcheck_nvml.readings import BY_NAME
from healthcheck_nvml.watcher import Watcher


def read_for(seconds: float, work: Any = None) -> tuple[dict[str, float], dict[str, str]]:
    """Mean of all readings at 10 Hz over some seconds, while ``work`` is called; and what is missing."""
    watcher = Watcher(list(BY_NAME), 0.1, torch).start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if work is not None:
            work()
        else:
            time.sleep(0.05)
    torch.cuda.synchronize()
    watcher.stop()
    if watcher.reason:
        raise SystemExit(f"nothing can be read: {watcher.reason}")
    return {name: value for _, name, value in watcher.take()}, watcher.missing


def readings_move() -> bool:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    time.sleep(2)
    rest, missing = read_for(3)
    load, _ = read_for(8, work)
    print(f"{'metric':<28}{'at rest':>14}{'under load':>14}")
    for name in BY_NAME:
        if name in load:
            print(f"{name:<28}{rest.get(name, math.nan):>14.6g}{load[name]:>14.6g}")
        else:
            print(f"{name:<28}{'not available':>28}  {missing.get(name, '')}")
    moved = {name: load[name] > rest[name] for name in ("nvml.power", "nvml.utilization", "nvml.temperature")}
    print("higher under load:", json.dumps(moved))
    return all(moved.values())


def small_model() -> tuple[Any, Any, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(512, 2048, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    return model, optimizer, step


def in_a_session() -> bool:
    model, optimizer, step = small_model()
    rules = {
        "version": 1,
        "extends": ["nvml:cards"],
        "settings": {"nvml.every": 0.2},
        "rules": {
            "warm": {"metric": "nvml.temperature", "when": {"above": 1}, "severity": "info"},
            "at-work": {"metric": "nvml.power", "when": {"above": 1}, "severity": "info"},
        },
    }
    from importlib.metadata import entry_points

    installed = any(point.name == "nvml" for point in entry_points(group="healthcheck"))
    plugins = [] if installed else [str(Path(__file__).with_name("as_a_file.py"))]
    name = "nvml" if installed else "as_a_file"
    rules["extends"] = [f"{name}:cards"]
    with healthcheck.watch(model, optimizer, rules=rules, plugins=plugins) as health:
        until = time.monotonic() + 6
        while time.monotonic() < until:
            step()
            health.step()
    assert health.session is not None
    assert health.session.report is not None
    values = {series: health.session.history(series, 100) for series in ("nvml.temperature", "nvml.power", "nvml.xid")}
    print({series: [value for _, value in found][-3:] for series, found in values.items()})
    verdicts = {rule: entry["verdict"] for rule, entry in health.session.report["rules"].items()}
    print("verdicts:", json.dumps(verdicts))
    return bool(values["nvml.temperature"]) and bool(values["nvml.power"])


def what_it_costs(blocks: int, seconds: float, every: float) -> bool:
    _, _, step = small_model()
    for _ in range(200):
        step()

    def block(on: bool) -> float:
        watcher = Watcher(list(BY_NAME), every, torch).start() if on else None
        if watcher is not None:
            while not watcher.rounds and not watcher.reason:  # starting NVML is not what is measured
                step()
        began = time.perf_counter()
        steps = 0
        while time.perf_counter() < began + seconds:
            step()
            steps += 1
        took = time.perf_counter() - began
        if watcher is not None:
            watcher.stop()
        return took / steps  # the mean: a median would not show one slow step in a second

    ratios = []
    for pair in range(blocks):
        order = (True, False) if pair % 2 else (False, True)
        found = {on: block(on) for on in order}
        ratios.append(math.log(found[True] / found[False]))
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    student = 2.045 if len(ratios) >= 30 else 2.57  # 29 and 5 degrees of freedom
    low, high = math.exp(mean - student * error), math.exp(mean + student * error)
    print(
        f"{blocks} pairs of blocks of {seconds:g} s at {1 / every:g} Hz: with / without = {math.exp(mean):.5f}, 95 % {low:.5f} to {high:.5f}"
    )
    return low <= 1 <= high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--every", type=float, default=1.0)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return 1
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, healthcheck {healthcheck.__version__}")
    parts = {
        "readings move": readings_move(),
        "samples in a session": in_a_session(),
        "1 Hz costs nothing measurable": what_it_costs(given.blocks, given.seconds, given.every),
    }
    print(json.dumps(parts))
    return 0 if all(parts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
