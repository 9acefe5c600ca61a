"""Several ranks: are shards measured as wholes, does one rank's alert stop all at one step, what does watching cost?

    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/ranks.py
    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/ranks.py --device cpu --blocks 2
    python -m torch.distributed.run --standalone --nproc_per_node 2 benchmarks/ranks.py --parts cost --cases gpt-10m \
        --blocks 200 --allowance 0.02     a long run, which has used up its allowance

NCCL on cards, gloo on the CPU. Rank 0 prints: the largest relative difference between the norms that watching a
model under FSDP2 gives and fp64 norms of the same gradients, gathered; what comparing copies costs under DDP, that it waits for no
device and names a copy that is changed; the steps at which the ranks ended after a loss that was NaN on
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
from overhead_variants import OURS, only_now

import healthcheck
from healthcheck.device.checksums import checksums
from healthcheck.run import budget

QUIET: dict[str, Any] = {"console": False, "record": False}
STOP = {"version": 1, "rules": {"bad": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]}}}
BAD_STEP = 10
PARTS = ("shards", "agreement", "parity", "cost")


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
    replicated = 0.0
    for _ in range(steps):
        plain.zero_grad()
        whole(data).backward()
        before = math.hypot(*(float(p.grad.double().norm()) for p in whole.parameters()))
        plain.step()
        ours.zero_grad()
        loss = sharded(data)
        loss.backward()
        # In fp64, of the very gradients that are measured, gathered from all ranks.
        norms = {name: float(p.grad.full_tensor().double().norm()) for name, p in sharded.named_parameters()}
        wanted.append({"": math.hypot(*norms.values()), **norms})
        replicated = max(replicated, abs(wanted[-1][""] - before) / before)
        ours.step()
        health.step(loss=loss)
    health.close()
    apart = []
    for name in wanted[0]:
        for step, value in health.history(f"grad_norm[{name}]" if name else "grad_norm"):
            apart.append(abs(value - wanted[step - 1][name]) / max(wanted[step - 1][name], 1e-12))
    faults = [*health.session.internal_errors, *health.session.dispatch.errors]
    say(
        f"FSDP2, {len(apart):,} norms against fp64 of the gathered gradients: largest relative difference {max(apart):.2g}; "
        f"of the whole model's {replicated:.2g}; faults of ours: {len(faults)}"
    )


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


def parity(case: Case, device: str, steps: int = 130) -> None:
    """What comparing ranks costs under DDP, that it waits for no device, and that a copy that is changed on one rank is named."""
    torch.manual_seed(0)
    model = DistributedDataParallel(case.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    data = [case.data(device) for _ in range(4)]
    health = healthcheck.watch(model, optimizer, rules="healthcheck:ranks", **QUIET)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        if device == "cuda" and step == 12:
            _wait(device)
            began = time.perf_counter()
            torch.cuda.set_sync_debug_mode("error")  # a wait of ours raises in our code, and is counted
        optimizer.zero_grad()
        loss = model(data[step % 4])
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
        if step == 31 and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    _wait(device)
    each = (time.perf_counter() - began) / (steps - 12)
    health.close()
    session = health.session
    own = sum(session.board.cost[name].ns for name in ("replicas", "rank-times") if name in session.board.cost) / steps
    faults = [*session.internal_errors, *session.dispatch.errors]
    say(
        f"DDP, {steps} steps of {each * 1e3:.1f} ms: host time of comparing {own / 1e3:.0f} us a step, {own / 1e7 / each:.3f} %"
    )
    say(f"  a copy that rank {dist.get_world_size() - 1} changed after step 31: "
        f"{[(a.name, a.fired_step, a.facts) for a in session.alerts]}; faults of ours: {faults}")  # fmt: skip
    if device == "cuda":
        params = list(model.parameters())
        state = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sums = []
        for _ in range(3):
            begins.record()
            sums = [checksums(params), checksums(state), checksums([p.grad for p in params])]
            ends.record()
        _wait(device)
        assert all(one.values() is not None for one in sums)
        device_ms = begins.elapsed_time(ends)
        say(f"  on the device {device_ms:.2f} ms in a comparison, {device_ms / 10 / each / 50:.4f} % of 50 steps")


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
            step, health = made[variant]
            with contextlib.nullcontext() if health is None else only_now(health):
                began = time.perf_counter()
                for _ in range(steps):
                    step()
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
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--parts", default=",".join(PARTS), help="of the run, separated by commas")
    parser.add_argument("--cases", help="whose step times are measured")
    parser.add_argument("--allowance", type=float, metavar="SECONDS", help="of our own time, before the budget binds")
    args = parser.parse_args()
    parts = set(args.parts.split(","))
    if unknown := parts - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.allowance is not None:
        budget.ALLOWANCE = args.allowance
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo")
    cases = (("gpt-124m", 5), ("gpt-10m", 10)) if args.device == "cuda" else (("gpt-10m-cpu", 1),)
    small = CASES[cases[-1][0]]
    say(torch.cuda.get_device_name() if args.device == "cuda" else "CPU", f"torch {torch.__version__}")
    if "shards" in parts:
        shards(CASES[cases[0][0]], args.device)
    if "agreement" in parts:
        agreement(small, args.device)
    if "parity" in parts:
        parity(CASES[cases[0][0]], args.device, 240 if args.device == "cuda" else 100)
    for name, steps in cases if "cost" in parts else ():
        if args.cases and name not in args.cases.split(","):
            continue
        cost(name, args.device, args.blocks, steps)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
