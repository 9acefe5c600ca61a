"""What watching costs: step time with and without it, interleaved in one process.

    python benchmarks/overhead.py --case gpt-124m --blocks 40 --json out.json
    python benchmarks/overhead.py --case gpt-10m-cpu --device cpu

Every variant has a model, optimizer and session of its own, all alive at the same time. A round runs
one block of steps of each variant, in random order; the ratio of a variant in a round is its block's
time over that of the block without anything in the same round. Printed: median of the ratios and its
95 % bootstrap interval. ``nothing again`` is a second copy without anything: what it shows is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from overhead_models import CASES, Case

import healthcheck

FAMILY = {
    "version": 1,
    "extends": ["healthcheck:recommended"],
    "rules": {
        "each-gradient": {"metric": "grad_norm[*]", "when": "nonfinite"},
        "bad-elements": {"metric": "grad_nonfinite", "when": {"above": 0}},
    },
}
NORMS = {
    "version": 1,
    "rules": {
        "loss-not-finite": {"metric": "loss", "when": "nonfinite"},
        "grads-not-finite": {"metric": "grad_norm", "when": "nonfinite"},
    },
}
RATIOS = {
    **NORMS,
    "rules": {**NORMS["rules"], "ratio": {"metric": "update_ratio", "when": {"above": 100}, "every": 10}},
}


@dataclass
class Variant:
    """One way to train: the plain step, and what is done around it."""

    name: str
    step: Callable[[], None]
    close: Callable[[], None] = lambda: None
    times: list[float] = field(default_factory=list)


def make(name: str, case: Case, device: str, *, compiled: bool, fused: bool) -> Variant:
    """Build one variant with its own model of the same seed."""
    torch.manual_seed(0)
    model = case.build().to(device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    data = case.data(device)
    health: Any = None
    rules = {
        "recommended": "healthcheck:recommended",
        "recommended + per parameter": FAMILY,
        "loss and norm": NORMS,
        "loss, norm, update ratio every 10": RATIOS,
        "no rules": {"version": 1, "rules": {}},
    }.get(name)
    if rules is not None:
        health = healthcheck.watch(model, optimizer, rules=rules, console=False, record=False)
        if name == "no rules":
            assert not health.session.watching
            assert not optimizer._optimizer_step_pre_hooks

    def loss_of() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext():
            return forward(data)  # type: ignore[no-any-return]

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        if name == "clip + .item()":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm.item(), loss.item()
        elif name == "loops: isnan, norm per parameter":
            for p in model.parameters():
                if p.grad is not None:
                    bool(p.grad.isnan().any()), p.grad.norm().item()
        optimizer.step()
        if name == "loss.item()":
            loss.item()
        if health is not None:
            health.step(loss=loss)

    if name == "anomaly mode":
        inner = step

        def step() -> None:
            with torch.autograd.set_detect_anomaly(True):
                inner()

    return Variant(name, step, health.close if health is not None else lambda: None)


VARIANTS = (
    "nothing",
    "nothing again",
    "no rules",
    "loss and norm",
    "loss, norm, update ratio every 10",
    "recommended",
    "recommended + per parameter",
    "loss.item()",
    "clip + .item()",
    "loops: isnan, norm per parameter",
    "anomaly mode",
)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def block(variant: Variant, steps: int, device: str) -> float:
    """Seconds of so many steps, with an idle device before and after."""
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        variant.step()
    wait(device)
    return time.perf_counter() - began


def bootstrap(ratios: list[float], rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the median, by resampling blocks."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds) - 1]


def run(args: argparse.Namespace, case: Case, chosen: list[str]) -> list[dict[str, Any]]:
    variants = [make(name, case, args.device, compiled=args.compile, fused=args.fused) for name in chosen]
    steps = args.steps or case.steps
    for variant in variants:
        block(variant, max(12, steps), args.device)
    chance = random.Random(1)
    for _ in range(args.blocks):
        for variant in chance.sample(variants, len(variants)):
            variant.times.append(block(variant, steps, args.device) / steps)
    base = variants[0].times
    rows = []
    for variant in variants:
        ratios = [own / plain for own, plain in zip(variant.times, base, strict=True)]
        low, high = bootstrap(ratios)
        row = {
            "variant": variant.name,
            "ms": statistics.median(variant.times) * 1e3,
            "ratio": statistics.median(ratios),
        }
        rows.append({**row, "low": low, "high": high, "blocks": len(ratios)})
        print(
            f"{variant.name:36} {row['ms']:9.3f} ms  {row['ratio']:.4f}  [{low:.4f}, {high:.4f}]",
            flush=True,
        )
        variant.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="gpt-10m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fused", action="store_true", help="fused AdamW instead of torch's default")
    parser.add_argument("--only", action="append", help="these variants, beside `nothing`")
    parser.add_argument("--without", action="append", default=[], help="leave a variant out")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    chosen = [v for v in VARIANTS if v == "nothing" or ((not args.only or v in args.only) and v not in args.without)]
    case = CASES[args.case]
    torch.manual_seed(0)
    counted = sum(p.numel() for p in case.build().parameters())
    facts = {
        "case": args.case,
        "parameters": counted,
        "compiled": args.compile,
        "fused": args.fused,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "healthcheck": healthcheck.__version__,
        "command": " ".join(sys.argv),
    }
    print(json.dumps(facts))
    rows = run(args, case, chosen)
    assert all(math.isfinite(row["ratio"]) for row in rows)
    if args.json:
        Path(args.json).write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
