"""What the engine costs per step, beside a calibration loop on the same machine.

    python benchmarks/engine.py            # table
    python benchmarks/engine.py --json     # the same as JSON

Processor time is measured. Absolute times depend on the machine and on what else it does; the calibration column (a loop of
plain function calls, measured in turn with each row) lets rows of different runs be compared. The last column is exact: calls of Python
functions in a step once windows are full. In a training loop, where all this is cold, they are what a step costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from healthcheck.assembly import plugin_host
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import Moment
from healthcheck.engine.engine import Engine
from healthcheck.rulelang.compile import load_rules

BLOCK = 32
"""Steps that a live run judges together where they are short."""
STEPS = 3_000
ROUNDS = 7

# Twenty rules as a careful team writes them: thresholds, guards, two spike detectors, a trend.
TWENTY = """
version: 1
external: [reward, kl, entropy, gate.load]
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [evidence, stop]}
  grads-not-finite: {metric: grad_norm, when: nonfinite, only_if: {amp.skipped: 0}, severity: error, then: [stop]}
  loss-spike: {metric: loss, when: {robust_z: {above: 10, window: 128, min_ratio: 1.25}}, for: 2 of 5, then: [evidence]}
  grad-norm-spike: {metric: grad_norm, when: {robust_z: {above: 10, window: 128, min_ratio: 2}}, for: 3 of 10}
  memory-high: {metric: memory.fraction, when: {above: 0.92}, recover: {below: 0.88}, for: 3}
  lr-stuck-at-zero: {metric: lr, when: {equals: 0}, for: 20}
  not-stepping: {metric: updates.missing, when: {at_least: 20}}
  skipped-steps: {metric: amp.skipped_streak, when: {at_least: 20}, severity: error}
  loss-scale-collapse: {metric: amp.scale, when: {below: 1}, for: 3, severity: error}
  kl-high: {metric: kl, when: {above: 0.2}, for: 3 of 5}
  entropy-low: {metric: entropy, when: {below: 0.01}, for: 10}
  reward-flat: {metric: reward, when: {unchanged: {over: 50}}}
  gate-hot: {metric: gate.load, when: {above: 3}, for: 200}
  loss-cap: {metric: loss, when: {above: 20}}
  clip-often: {metric: clip.applied, when: {mean: {above: 0.5, window: 200}}}
  data-slow: {metric: time.data, when: {above: 0.5}, for: 5}
  step-slow: {metric: time.step, when: {above: 10}}
  host-full: {metric: memory.host_fraction, when: {above: 0.95}}
  memory-creeps: {metric: memory.allocated, when: {slope: {above: 1MiB, over: 50}}, every: 10}
  grad-cap: {metric: grad_norm, when: {above: 1000}}
"""
METRICS = (
    "loss", "grad_norm", "lr", "kl", "entropy", "reward", "gate.load", "clip.applied", "time.data", "time.step",
    "memory.fraction", "memory.allocated", "memory.host_fraction", "amp.scale", "amp.skipped", "amp.skipped_streak",
    "updates.missing",
)  # fmt: skip

CONDITIONS = {
    "above": 8,
    "nonfinite": None,
    "unchanged": {"over": 50},
    "zscore": {"above": 8, "window": 200},
    "robust_z": {"above": 8, "window": 200},
    "ratio": {"above": 3, "to": "median", "window": 200},
    "mean": {"above": 8, "window": 200},
    "increase": {"above": 100, "window": 200},
    "no_improvement": {"over": 2000, "min_rel": 0.01},
    "slope": {"above": 1, "over": 50},
}


def calibration() -> float:
    """Microseconds for 100 calls of a small function: how fast this machine is just now."""

    def small(x: float) -> bool:
        return x > 8

    began = time.process_time()
    for _ in range(20_000):
        small(2.0)
    return (time.process_time() - began) / 200 * 1e6


def rules_of(text: Any) -> Any:
    return load_rules([text], registry=plugin_host().registry)


def data(metrics: tuple[str, ...], steps: int) -> list[list[Sample]]:
    noise = random.Random(0)
    healthy = {"lr": 3e-4, "amp.skipped": 0.0, "amp.skipped_streak": 0.0, "updates.missing": 1.0, "amp.scale": 65536.0}
    return [
        [Sample(m, step, healthy.get(m, 0.3 + 0.01 * noise.gauss(0, 1))) for m in metrics]
        for step in range(1, steps + 1)
    ]


def per_step(make: Callable[[], Engine], batches: list[list[Sample]], block: int = 1) -> list[tuple[float, float]]:
    """(microseconds per step, calibration) of several rounds, in which so many steps are judged together."""
    rounds = []
    moments = [Moment(step, samples, float(step)) for step, samples in enumerate(batches, 1)]
    blocks = [moments[i : i + block] for i in range(0, len(moments), block)]
    for _ in range(ROUNDS):
        engine = make()
        gc.collect()
        beat = calibration()
        began = time.process_time()
        for given in blocks:
            engine.judge(given)
        rounds.append(((time.process_time() - began) / len(batches) * 1e6, beat))
    return rounds


def calls_per_step(engine: Engine, batches: list[list[Sample]]) -> float:
    """Calls of Python functions in one step, in the second half of the batches."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    half = len(batches) // 2
    for step, samples in enumerate(batches, 1):
        if step > half:
            sys.setprofile(called)
        engine.evaluate(step, samples, float(step))
        sys.setprofile(None)
    return count / (len(batches) - half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    json_wanted = parser.parse_args().json
    rows: dict[str, dict[str, float]] = {}

    def row(name: str, rounds: list[tuple[float, float]]) -> None:
        rows[name] = {
            "us": round(statistics.median(r[0] for r in rounds), 3),
            "best_us": round(min(r[0] for r in rounds), 3),
            "calibration_us": round(statistics.median(r[1] for r in rounds), 3),
        }

    def steps(name: str, rules: Any, batches: list[list[Sample]]) -> None:
        row(f"{name}, one step", per_step(lambda: Engine(rules), batches))
        rows[f"{name}, one step"]["calls"] = round(calls_per_step(Engine(rules), batches), 1)
        if len(batches) >= BLOCK:
            row(f"{name}, a step in a block", per_step(lambda: Engine(rules), batches, BLOCK))

    twenty = rules_of(TWENTY)
    steps(f"{len(twenty.rules)} rules", twenty, data(METRICS, STEPS))
    pack = rules_of({"version": 1, "extends": ["healthcheck:recommended"]})
    steps(f"the recommended pack ({len(pack.rules)} rules)", pack, data(METRICS, STEPS))
    for name, options in CONDITIONS.items():
        when = name if options is None else {name: options}
        one = rules_of({"version": 1, "external": ["x"], "rules": {"r": {"metric": "x", "when": when}}})
        steps(f"one rule with {name}", one, data(("x",), 10_000))
    thousand = rules_of(
        {
            "version": 1,
            "external": ["x"],
            "rules": {f"r{i}": {"metric": "x", "when": {"above": 9 + i}} for i in range(1000)},
        }
    )
    steps("1,000 rules on one metric", thousand, data(("x",), 100))
    family = rules_of({"version": 1, "rules": {"r": {"metric": "grad_norm[*]", "when": {"above": 9}}}})
    names = [(("parameter", f"layer{i}.weight"),) for i in range(10_000)]
    wide = [[Sample("grad_norm", step, 1.0, labels) for labels in names] for step in range(1, 11)]
    steps("family of 10,000 series", family, wide)
    many = {
        "version": 1,
        "external": ["x"],
        "rules": {f"r{i}": {"metric": "x", "when": {"robust_z": {"above": 8}}, "hint": "h"} for i in range(500)},
    }
    loads = []
    for _ in range(ROUNDS):
        gc.collect()
        beat = calibration()
        began = time.process_time()
        rules_of(many)
        loads.append(((time.process_time() - began) * 1e6, beat))
    row("loading 500 rules", loads)
    if json_wanted:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'':44}{'median us':>12}{'best us':>12}{'100 calls us':>14}{'calls':>8}")
    for name, values in rows.items():
        figures = f"{values['us']:>12,.2f}{values['best_us']:>12,.2f}{values['calibration_us']:>14,.2f}"
        print(f"{name:44}{figures}{values.get('calls', ''):>8}")


if __name__ == "__main__":
    main()
