"""Jobs that hang, as processes over gloo: is the rank named that the others wait for, or is it said that this is not known?

    python benchmarks/rank_hangs.py --runs 10 --jobs 2       # of each kind; exit code 1 if a wrong rank is named
    python benchmarks/rank_hangs.py --only "missing enter:3" --keep /tmp/hangs
    python benchmarks/rank_hangs.py --nccl --only "missing enter:1" "mismatch:1" "missing enter:2"   # two cards

Kinds: a rank that does not enter a collective, one that enters another one, one whose process is stopped (as a node that is gone),
one whose data loader never comes back. Half of the runs train through DDP, whose reductions only the flight recorder sees; a fourth
of them without it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import soak

KINDS = ("missing enter", "mismatch", "dead rank", "slow loader")
RULES = """
version: 1
extends: [healthcheck:core]
rules:
  hang: {when: {stale: {after: 8s, first: 100s, times: 2}}, then: [warn, ask_ranks, {stop: {mode: abort, exit_code: 75}}]}
"""
TRAIN = """
import json, os, signal, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
plan, rank = json.loads(os.environ["PLAN"]), int(os.environ["RANK"])
kind, mine = plan["kind"], rank == plan["rank"]
device = "cuda" if plan["nccl"] else "cpu"
if plan["nccl"]:
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if plan["nccl"] else "gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).to(device)
wrapped = DDP(model) if plan["ddp"] else model
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if kind == "slow loader" and mine and index >= 8 * plan["at"]:
            time.sleep(600)
        return torch.randn(8)

def elsewhere():
    time.sleep(600)

for step, x in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=8), start=1):
    if kind == "missing enter" and mine and step == plan["at"]:
        elsewhere()
    if kind == "dead rank" and mine and step == plan["at"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    wrapped(x.to(device)).square().mean().backward()
    if kind == "mismatch" and mine and step == plan["at"]:
        dist.broadcast(torch.ones(4, device=device), plan["rank"])
    if not plan["ddp"]:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    total = torch.zeros(1, device=device)
    dist.all_reduce(total)
    float(total)
"""


@dataclass
class Plan:
    kind: str
    seed: int
    world: int
    rank: int
    at: int
    ddp: bool
    recorder: bool
    nccl: bool = False
    unwatched: int = -1
    observe: bool = False


def plan_of(kind: str, seed: int, nccl: bool = False) -> Plan:
    rng = random.Random(f"{kind}:{seed}")
    world = 2 if nccl else rng.choice((3, 4))
    # Rank 0 holds the store; what the others say of its end is not what is asked here.
    rank = rng.randrange(1, world) if kind == "dead rank" else rng.randrange(world)
    return Plan(kind, seed, world, rank, rng.randrange(10, 30), ddp=seed % 2 == 0, recorder=seed % 4 != 3, nccl=nccl)


def one(kind: str, seed: int, keep: Path | None = None, nccl: bool = False) -> dict[str, object]:
    plan = plan_of(kind, seed, nccl)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000" if plan.recorder else "0"

    def judge(folder: Path, codes: dict[int, int]) -> tuple[bool, dict[str, object]]:
        # Not from the report: on a machine as busy as one that runs several of these a process may not get to write it in time.
        records = [p for p in (folder / "runs").glob("*/alerts.jsonl") if not p.parent.is_symlink()]
        alerts = [json.loads(line) for record in records for line in record.read_text().splitlines()]
        alerts = [alert for alert in alerts if alert["rule"] == "hang" and alert["rank"] == 0]
        facts = alerts[-1]["facts"] if alerts else {}
        named = str(facts.get("ranks", ""))
        how = "right" if named == str(plan.rank) else "unknown" if not named or facts.get("which") else "wrong"
        if not alerts:
            how = "no alert"
        said = {"how": how, "facts": facts, "code": codes.get(0), "folder": str(folder), "plan": asdict(plan)}
        return how in ("right", "unknown"), said

    found: dict[str, object] = soak.in_folder(f"hang-{kind}-{seed}", plan, TRAIN, RULES, keep, judge, limit=100)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each kind")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND:SEED")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--nccl", action="store_true", help="two ranks on two cards; both are named where neither is right"
    )
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    soak.warm_up()
    runs = soak.kinds_and_seeds(given.only)
    runs = runs or [(kind, given.seed + n) for kind in KINDS for n in range(given.runs)]
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    codes: collections.Counter[object] = collections.Counter()
    for (kind, seed), said in soak.in_forks(runs, given.jobs, lambda run: one(*run, given.keep, given.nccl)):
        how = said["how"] if said else "could not be judged"
        rows[kind][how] += 1
        codes[said and said["code"]] += 1
        if how != "right" or given.only:
            print(f"--- {kind}:{seed}: {how} {said}", flush=True)
    print(f"commit {soak.commit()}, seeds from {given.seed}; exit codes of rank 0: {dict(codes)}\n")
    print("| hang | runs | right rank | unknown, and said so | wrong rank | no alert |")
    print("|---|---|---|---|---|---|")
    for kind, counted in rows.items():
        cells = [str(counted[how] or "") for how in ("right", "unknown", "wrong", "no alert")]
        print(f"| {kind} | {sum(counted.values())} | {' | '.join(cells)} |")
    return 1 if any(counted["wrong"] + counted["could not be judged"] for counted in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
