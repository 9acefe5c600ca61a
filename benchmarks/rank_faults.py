"""Faults of several ranks and their healthy twins, as processes over gloo: is each named by its cause, and is nothing said of the
healthy ones?

    python benchmarks/rank_faults.py --healthy 200 --faults 30 --jobs 2   # a table; exit code 1 if anything is wrong
    python benchmarks/rank_faults.py --only drift:3 batchnorm:1 --keep /tmp/ranks

Each run is made of its kind and seed: 2 or 4 processes, forks of one that has torch imported, train a small model under
``healthcheck run`` with the rules of the pack ``ranks``. ``tests/trainers/test_rank_faults.py`` does some of them.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import soak

TRAIN = (Path(__file__).parent / "rank_kinds.py").read_text()

HEALTHY = (
    "ddp", "batchnorm", "accumulation", "uneven", "join", "local sgd", "no_sync sgd", "hook sgd", "fsdp2", "hsdp", "zero",
    "clipping", "frozen", "compressed", "unused", "evaluation", "two models", "augmented",
)  # fmt: skip
"""Kinds of healthy runs."""
FAULTS = {
    "drift": {"replicas-differ.changed-outside-update"},
    "hidden drift": {"replicas-differ.weights"},
    "bit flip": {"replicas-differ.single-value", "replicas-differ.changed-outside-update"},
    "replaced": {"ddp-bypassed.parameters-replaced"},
    "alternating": {"ddp-bypassed.gradients-differ"},
    "bypassed": {"ddp-bypassed.never-called", "ddp-bypassed.gradients-differ"},
    "state": {"replicas-differ.optimizer-state"},
    "lr": {"replicas-differ.learning-rate"},
    "equal batches": {"equal-batches"},
    "equal loader": {"equal-batches"},
    "other start": {"replicas-differ.weights"},
    "other settings": {"replicas-differ.at-start"},
}
"""Kinds of faults, and the causes of which one must fire."""
BLAMED = {"drift", "state", "lr", "other settings"}
"""Kinds of which the rank must be named: with four ranks by the majority, with two only where there is evidence."""
STRAGGLERS = ("slow data", "slow forward", "slow collective")
FOUR = {"hsdp", *STRAGGLERS}


@dataclass
class Plan:
    """One run."""

    kind: str
    seed: int
    world: int
    rank: int
    """The rank at fault."""
    at: int
    """The step of the fault, where it has one."""
    steps: int = 124
    optimizer: str = "sgd"
    unwatched: int = -1
    observe: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def plan_of(kind: str, seed: int) -> Plan:
    rng = random.Random(f"{kind}:{seed}")
    world = 4 if kind in FOUR else rng.choice((2, 2, 4))
    plan = Plan(kind, seed, world, rng.randrange(world), rng.randrange(12, 70), optimizer=rng.choice(("sgd", "adam")))
    if kind in ("state", "zero"):
        plan.optimizer = "adam"
    if kind in STRAGGLERS:
        plan.steps = 70
    return plan


@dataclass
class Outcome:
    wrong: list[str]
    named: list[str]
    """Causes that fired on the rank that speaks."""
    first: int | None = None
    """The step at which the first of them fired."""


def judged(plan: Plan, folder: Path, codes: dict[int, int]) -> Outcome:
    """What is wrong with a run; nothing if a fault was named by its cause and a healthy run was not accused."""
    if killed := soak.hanging(folder, plan.world, codes):
        return Outcome(killed, [])
    errors = {rank: (folder / f"{rank}.err").read_text() for rank in range(plan.world)}
    wrong = [
        f"a fault of ours on rank {rank}: {fault[0]}"
        for rank, text in errors.items()
        if (fault := re.search(r'internal error.*|.* raised in .*|File "[^"]*/healthcheck/[^"]*\.py.*', text))
    ]
    for rank, text in errors.items():
        if codes[rank] not in (0, 1) or "Traceback" in text:
            wrong.append(f"rank {rank} failed ({codes[rank]}): {text[-600:]}")
        if note := re.search(r".*compared no longer.*|.*do not agree.*", text):
            wrong.append(f"rank {rank}: {note[0]}")
    reports = sorted(p for p in (folder / "runs").glob("*/report.json") if not p.parent.is_symlink())
    loaded = [json.loads(path.read_text()) for path in reports]
    # Rank 0 speaks, or one that has waited ten seconds for it, as happens on a busy machine.
    speaks = sorted(loaded, key=lambda report: report["rank"])[:1]
    if not speaks:
        return Outcome([*wrong, "no report"], [])
    alerts = speaks[0]["alerts"]
    named = [f"{a['rule']}.{a['cause']}" if a.get("cause") else a["rule"] for a in alerts]
    named += [f"{a['rule']}.{also['cause']}" for a in alerts for also in a.get("also", ()) if also.get("cause")]
    if plan.kind in HEALTHY:
        wrong += [f"healthy, and said {name}: {a['facts']}" for name, a in zip(named, alerts, strict=False)]
        judged_rules = speaks[0]["rules"]
        seen = judged_rules["replicas-differ"]["verdict"]
        if plan.kind in ("ddp", "batchnorm", "accumulation", "hsdp", "zero") and seen not in ("ok", "partly judged"):
            wrong.append(f"copies were not compared: {judged_rules['replicas-differ']}")
        return Outcome(wrong, named)
    expected = FAULTS.get(plan.kind) or {f"slow-rank.{plan.kind.removeprefix('slow ')}"}
    hit = [a for a, name in zip(alerts, named, strict=False) if name in expected]
    if not hit:
        wrong.append(f"not named: {named}")
    elif plan.kind in STRAGGLERS or (plan.kind in BLAMED and (plan.world > 2 or plan.kind == "drift")):
        ranks = str(hit[0]["facts"].get("ranks"))
        if ranks != str(plan.rank):
            wrong.append(f"it was rank {plan.rank}, and said {hit[0]['facts']}")
    if others := [name for name in named if name not in expected and not name.startswith(("spike", "update-too"))]:
        wrong += [
            f"beside it: {name}" for name in others if name.partition(".")[0] not in ("ddp-bypassed", "replicas-differ")
        ]
    return Outcome(wrong, named, min((a["fired_step"] for a in hit), default=None))


def one(kind: str, seed: int, keep: Path | None = None) -> Outcome:
    """Play one run; its folder goes away unless it is kept or something is wrong."""
    plan = plan_of(kind, seed)
    rules = "version: 1\nextends: [healthcheck:core, healthcheck:ranks]\n"

    def judge(folder: Path, codes: dict[int, int]) -> tuple[bool, Outcome]:
        outcome = judged(plan, folder, codes)
        if outcome.wrong:
            outcome.wrong.append(f"see {folder}")
        return not outcome.wrong, outcome

    found: Outcome = soak.in_folder(f"ranks-{kind}-{seed}", plan, TRAIN, rules, keep, judge)
    return found


def played(
    runs: list[tuple[str, int]], jobs: int, keep: Path | None = None
) -> Iterator[tuple[tuple[str, int], Outcome]]:
    """The outcome of each run, several at a time."""
    for run, said in soak.in_forks(runs, jobs, lambda run: asdict(one(*run, keep))):
        yield run, Outcome(**said) if said else Outcome(["the run itself could not be judged"], [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=0, help="healthy runs, kinds in turn")
    parser.add_argument("--faults", type=int, default=0, help="runs of each kind of fault")
    parser.add_argument("--stragglers", type=int, default=0, help="runs of each kind of slow rank")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="these kinds only")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND:SEED", help="these runs instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    soak.warm_up()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    runs = soak.kinds_and_seeds(given.only)
    healthy = [kind for kind in HEALTHY if not given.kinds or kind in given.kinds]
    runs += [(healthy[n % len(healthy)], given.seed + n // len(healthy)) for n in range(given.healthy) if healthy]
    for kinds, count in ((FAULTS, given.faults), (STRAGGLERS, given.stragglers)):
        for kind in kinds:
            if not given.kinds or kind in given.kinds:
                runs += [(kind, given.seed + n) for n in range(count)]
    rows: dict[str, list[Outcome]] = collections.defaultdict(list)
    wrong = 0
    for (kind, seed), outcome in played(runs, given.jobs, given.keep):
        rows[kind].append(outcome)
        if outcome.wrong or given.only:
            wrong += bool(outcome.wrong)
            print(
                f"--- {kind}:{seed}, {plan_of(kind, seed).world} ranks: {outcome.named} at {outcome.first}", flush=True
            )
            for text in outcome.wrong:
                print(f"    {text}", flush=True)
    print(f"commit {soak.commit()}, seeds from {given.seed}: {len(runs)} runs, {wrong} not as wanted\n")
    print("| run | runs | said | not as wanted |")
    print("|---|---|---|---|")
    for kind, found in rows.items():
        counted = collections.Counter(name for outcome in found for name in dict.fromkeys(outcome.named))
        words = ", ".join(f"{n} {name}" for name, n in counted.most_common()) or "nothing"
        print(f"| {kind} | {len(found)} | {words} | {sum(bool(o.wrong) for o in found) or ''} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
