"""Several ranks: are shards measured as wholes, does one rank's alert stop all at one step, what does watching cost?

    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/ranks.py
    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/ranks.py --device cpu --blocks 2

NCCL on cards, gloo on the CPU. Rank 0 prints: the largest relative difference between the norms that watching a
model under FSDP2 gives and those of the whole model, the steps at which the ranks ended after a loss that was NaN on
the last rank only, and step times under DDP, interleaved as in ``overhead.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from overhead_models import CASES, Case
from overhead_tables import line, rows_of
from overhead_variants import OURS

import healthcheck

QUIET: dict[str, Any] = {"console": False, "record": False}
STOP = {"version": 1, "rules": {"bad": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]}}}
BAD_STEP = 10


def say(*words: Any) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def shards(case: Case, device: str, steps: int = 6) -> None:
    """FSDP2 beside the whole model, on the same data: norms of all gradients and of each."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole, sharded = case.build().to(device), case.build().to(device)
    sharded.load_state_dict(whole.state_dict())
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    data = case.data(device)
    dist.broadcast(data, 0)
    plain, ours = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (whole, sharded))
    health = healthcheck.watch(sharded, ours, rules=OURS["recommended + per parameter"], **QUIET)
    wanted: list[dict[str, float]] = []
    for _ in range(steps):
        plain.zero_grad()
        whole(data).backward()
        norms = {name: float(p.grad.norm()) for name, p in whole.named_parameters()}
        wanted.append({"": math.hypot(*norms.values()), **norms})
        plain.step()
        ours.zero_grad()
        loss = sharded(data)
        loss.backward()
        ours.step()
        health.step(loss=loss)
    health.close()
    apart = []
    for name in wanted[0]:
        for step, value in health.history(f"grad_norm[{name}]" if name else "grad_norm"):
            apart.append(abs(value - wanted[step - 1][name]) / max(wanted[step - 1][name], 1e-12))
    faults = [*health.session.internal_errors, *health.session.dispatch.errors]
    say(f"FSDP2, {len(apart):,} norms: largest relative difference {max(apart):.2g}; faults of ours: {len(faults)}")


def agreement(case: Case, device: str) -> None:
    """A loss that is NaN on the last rank: all ranks must leave the loop at one step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(case.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = case.data(device)
    health = healthcheck.watch(model, optimizer, rules=STOP, **QUIET)
    step = 0
    while step < 100 and not health.should_stop:
        step += 1
        optimizer.zero_grad()
        loss = model(data)
        loss.backward()
        optimizer.step()
        bad = step == BAD_STEP and dist.get_rank() == dist.get_world_size() - 1
        health.step(loss=loss.detach() * math.nan if bad else loss)
    health.close()
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ends, (step, len(health.alerts)))
    say(f"NaN on the last rank at step {BAD_STEP}: (last step, alerts) of each rank: {ends}")


def cost(name: str, device: str, blocks: int, steps: int) -> None:
    """Step times under DDP, a block of each variant in random order; the same order on all ranks."""
    variants = ("nothing", "nothing again", "recommended", "recommended + per parameter")
    made = {variant: _training(CASES[name], device, OURS.get(variant)) for variant in variants}
    for step, _ in made.values():
        for _ in range(12 if device == "cuda" else 2):
            step()
    chance, times = random.Random(1), {variant: list[float]() for variant in variants}
    for _ in range(blocks):
        for variant in chance.sample(variants, len(variants)):
            _wait(device)
            dist.barrier()
            _wait(device)
            began = time.perf_counter()
            for _ in range(steps):
                made[variant][0]()
            _wait(device)
            times[variant].append((time.perf_counter() - began) / steps)
    say(f"# {name}, DDP, {dist.get_world_size()} ranks, {blocks} blocks of {steps} steps")
    for row in rows_of(times):
        say(line(row))
    for _, health in made.values():
        if health is not None:
            health.close()


def _training(case: Case, device: str, rules: Any) -> tuple[Callable[[], None], Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(case.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = case.data(device)
    health = healthcheck.watch(model, optimizer, rules=rules, **QUIET) if rules else None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext():
            loss = model(data)
        loss.backward()
        optimizer.step()
        if health is not None:
            health.step(loss=loss)

    return step, health


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=30)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo")
    cases = (("gpt-124m", 5), ("gpt-10m", 10)) if args.device == "cuda" else (("gpt-10m-cpu", 1),)
    small = CASES[cases[-1][0]]
    say(torch.cuda.get_device_name() if args.device == "cuda" else "CPU", f"torch {torch.__version__}")
    shards(small, args.device)
    agreement(small, args.device)
    for name, steps in cases:
        cost(name, args.device, args.blocks, steps)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
