"""Ranks out of step, as processes: do they stop together or all only report, and is nothing said that is not so?

    python benchmarks/soak.py --runs 200 --seed 1 --jobs 3   # a table; exit code 1 if anything is wrong
    python benchmarks/soak.py --only 17 --keep /tmp/soak     # one run again, with its folders
    python benchmarks/soak.py --runs 60 --allowance 0.02     # ranks that leave out steps

Each run is made of its seed alone: 2 or 4 gloo processes, forks of one that has torch imported, train a small model under
``healthcheck run``. They meet in a collective every step or every few dozen (local SGD), some are slow or begin late, some
make fewer steps between two meetings than others; a loss may become NaN on one rank, one rank may be unwatched (also rank 0), one
may die. ``tests/trainers/test_soak.py`` does ten of them.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT = 90.0
"""Seconds after which a run counts as one that hangs."""
STALL = 2.0
"""Seconds that one step may take, without what the script itself waits for."""

TRAIN = """
import json, os, signal, time, torch, torch.distributed as dist
plan, rank, world = json.loads(os.environ["PLAN"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
pace = plan["paces"][rank]
if rank == plan["late"]:
    time.sleep(plan["late_seconds"])
step, longest, began, waited = 0, 0.0, time.monotonic(), 0.0
def wait_in(function, *given):
    global waited
    at = time.monotonic()
    function(*given)
    waited += time.monotonic() - at
def say(how):
    apart = sum(int(b) for p in model.parameters() for b in p.detach().numpy().tobytes())
    print(json.dumps({"rank": rank, "step": step, "how": how, "longest": round(longest, 2), "weights": apart}), flush=True)
try:
    for round_ in range(plan["rounds"]):
        for _ in range(plan["lengths"][rank]):
            began, waited = time.monotonic(), 0.0
            step += 1
            wait_in(time.sleep, pace)
            if rank == plan["dies"] and step == plan["dies_at"]:
                say("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(8, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            if rank == plan["bad"] and step == plan["bad_at"]:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            if plan["every_step"]:
                for p in model.parameters():
                    wait_in(dist.all_reduce, p.grad)
                    p.grad /= world
            optimizer.step()
            longest = max(longest, time.monotonic() - began - waited)
        if not plan["every_step"]:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= world
except RuntimeError as error:
    say("lost")
    raise
except BaseException:
    longest = max(longest, time.monotonic() - began - waited)
    say("stopped")
    raise
say("ended")
dist.destroy_process_group()
"""


@dataclass
class Plan:
    """One run, made of its seed."""

    seed: int
    world: int
    kind: str
    """``every step``, ``local`` (meet every so many steps) or ``uneven`` (ranks make different numbers of steps)."""
    every_step: bool
    rounds: int
    lengths: list[int]
    """Steps of each rank between two meetings."""
    paces: list[float]
    """Seconds that each rank waits in a step."""
    late: int
    late_seconds: float
    bad: int
    """The rank whose loss becomes NaN; -1: none."""
    bad_at: int
    unwatched: int
    dies: int
    dies_at: int
    observe: bool


def plan_of(seed: int) -> Plan:
    rng = random.Random(f"soak:{seed}")
    world = rng.choice((2, 2, 4))
    kind = rng.choice(("every step", "local", "local", "uneven"))
    each = 1 if kind == "every step" else rng.choice((5, 20, 60))
    lengths = [each if kind != "uneven" else max(1, round(each * rng.choice((0.4, 1, 1.6)))) for _ in range(world)]
    rounds = max(2, 90 // each)
    steps = rounds * min(lengths)
    trouble = rng.choice(("none", "nan", "nan", "nan", "nan and unwatched", "unwatched", "dies", "nan and dies"))
    bad = rng.randrange(world) if "nan" in trouble else -1
    unwatched = rng.randrange(world) if "unwatched" in trouble else -1
    dies = rng.randrange(world) if "dies" in trouble else -1
    return Plan(
        seed=seed,
        world=world,
        kind=kind,
        every_step=kind == "every step",
        rounds=rounds,
        lengths=lengths,
        paces=[rng.choice((0.0, 0.002, 0.01, 0.03)) for _ in range(world)],
        late=rng.randrange(world) if rng.random() < 0.5 else -1,
        late_seconds=rng.choice((0.5, 1.5, 3.0)),
        bad=bad,
        bad_at=rng.randrange(1, steps + 1),
        unwatched=unwatched,
        dies=dies,
        dies_at=rng.randrange(1, steps + 1),
        observe=rng.random() < 0.1,
    )


# --------------------------------------------------------------------------- processes


def warm_up() -> None:
    """Import what every rank needs, once."""
    import torch
    import torch.distributed

    import healthcheck.cli.run  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer brings the compiler
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def start(rank: int, plan: Any, folder: Path, port: int, options: tuple[str, ...] = ()) -> int:
    """A fork that is this rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        for name in [n for n in os.environ if n.startswith(("HEALTHCHECK", "SLURM", "OMPI", "TORCHELASTIC"))]:
            del os.environ[name]
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(plan.world), RANK=str(rank), LOCAL_RANK=str(rank),
            PLAN=json.dumps(asdict(plan)), HEALTHCHECK_RUNS=str(folder / "runs"),
        )  # fmt: skip
        for number, name in ((1, f"{rank}.out"), (2, f"{rank}.err")):
            opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, number)
        faulthandler.register(signal.SIGUSR2, 2)
        if getattr(plan, "nccl", False):  # CUDA does not work in a fork of a process that has imported torch
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            )
            words = ["-m", "healthcheck", "run", *options, "--report", "json=report.json", "train.py"]
            os.execv(sys.executable, [sys.executable, *words])
        code = run_rank(rank, plan, options)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by the interpreter's own end, in which gloo's threads sometimes abort the process, with or without us.
        os._exit(code)


def run_rank(rank: int, plan: Any, options: tuple[str, ...] = ()) -> int:
    if rank == plan.unwatched:
        sys.argv[:] = ["train.py"]
        runpy.run_path("train.py", run_name="__main__")
        return 0
    from healthcheck.cli import main

    words = ["run", *(["--observe"] if plan.observe else []), *options, "--report", "json=report.json", "train.py"]
    sys.argv[:] = ["healthcheck", *words]
    return main(words)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def play(
    plan: Any, folder: Path, train: str = TRAIN, options: tuple[str, ...] = (), limit: float = LIMIT
) -> dict[int, int]:
    """Run all ranks; returns their exit codes (negative: ended by that signal), without those that had to be killed.

    :param plan: a dataclass with ``world``, ``unwatched`` and ``observe``; the script finds it in ``PLAN``.
    """
    (folder / "train.py").write_text(train)
    port = free_port()
    ranks = {start(rank, plan, folder, port, options): rank for rank in range(plan.world)}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + limit
    while ranks and time.monotonic() < deadline:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGUSR2)  # says where it stands, in its stderr
    time.sleep(0.5 if ranks else 0)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def hanging(folder: Path, world: int, codes: dict[int, int]) -> list[str]:
    """The ranks of this run that had to be killed, and where each stood."""
    return [
        f"rank {rank} did not end in {LIMIT:.0f} s: {(folder / f'{rank}.err').read_text()[-4000:]}"
        for rank in range(world)
        if rank not in codes
    ]


def in_folder(
    name: str,
    plan: Any,
    train: str,
    rules: str,
    keep: Path | None,
    judge: Callable[[Path, dict[int, int]], Any],
    limit: float = LIMIT,
) -> Any:
    """Play a run under these rules in a folder of its own, and what ``judge`` says of it: ``(as wanted, what to hand on)``.

    The folder goes away unless it is kept or the run is not as wanted.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '_')}-", dir=keep))
    (folder / "rules.yaml").write_text(rules)
    as_wanted, said = judge(folder, play(plan, folder, train, ("--rules", "rules.yaml"), limit))
    if as_wanted and keep is None:
        shutil.rmtree(folder)
    return said


def kinds_and_seeds(texts: list[str]) -> list[tuple[str, int]]:
    """``drift:3`` as written with ``--only``."""
    return [(kind, int(seed)) for kind, _, seed in (text.rpartition(":") for text in texts)]


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


# --------------------------------------------------------------------------- what must hold


@dataclass
class Outcome:
    wrong: list[str]
    how: str
    """What became of the run, for the table."""
    longest: float
    verdict: str


def judged(plan: Plan, folder: Path, codes: dict[int, int], stall: float = STALL) -> Outcome:
    """What is wrong with a run; nothing if all ranks did the same and nothing untrue was said."""
    ends: dict[int, dict[str, Any]] = {}
    for rank in range(plan.world):
        lines = [line for line in (folder / f"{rank}.out").read_text().splitlines() if line.startswith("{")]
        if lines:
            ends[rank] = json.loads(lines[-1])
    errors = {rank: (folder / f"{rank}.err").read_text() for rank in range(plan.world)}
    watched = [rank for rank in range(plan.world) if rank != plan.unwatched]
    alive = [rank for rank in watched if not (rank in ends and ends[rank]["how"] == "dies")]
    wrong: list[str] = []
    if killed := hanging(folder, plan.world, codes):
        return Outcome(killed, "hangs", LIMIT, "")
    if silent := [rank for rank in range(plan.world) if rank not in ends]:
        return Outcome([f"rank {silent} said nothing"], "?", 0.0, "")
    dead = ends[plan.dies]["how"] == "dies" if plan.dies >= 0 else False

    how = {ends[rank]["how"] for rank in alive}
    if "stopped" in how:
        if how != {"stopped"}:
            wrong.append(
                "one left alone: " + ", ".join(f"rank {r} {ends[r]['how']} at {ends[r]['step']}" for r in alive)
            )
        elif len({ends[rank]["step"] for rank in alive}) > 1:
            wrong.append(f"stopped at steps {[ends[rank]['step'] for rank in alive]}")
        if plan.bad < 0 or plan.observe:
            wrong.append("stopped without a reason")
        if plan.unwatched >= 0 or dead:
            wrong.append("stopped although not all ranks could agree")
    elif "lost" in how and not dead:
        wrong.append("a collective failed although nobody died")
    longest = max(ends[rank]["longest"] for rank in alive) if alive else 0.0
    if longest > stall:
        wrong.append(f"a step took {longest} s")

    # Ranks whose gradients are the same must stay the same, whatever was held back: NaN or not.
    if plan.every_step and not dead and "lost" not in how:
        same = {ends[rank]["weights"] for rank in range(plan.world) if rank in watched or how == {"ended"}}
        if len(same) > 1:
            wrong.append(f"weights of ranks that train in step differ: {sorted(same)}")

    nan_seen = plan.bad in alive and ends[plan.bad]["step"] >= plan.bad_at
    speakers = [rank for rank, text in errors.items() if re.search(r"^healthcheck: [A-Z]", text, re.MULTILINE)]
    if len(speakers) > 1:
        wrong.append(f"ranks {speakers} speak")
    reports = sorted(p for p in (folder / "runs").glob("*/report.json") if not p.parent.is_symlink())
    verdict = ""
    # Rank 0 speaks, or one that stands in for it: it is not watched, or began ten seconds later.
    if not speakers and not dead:
        wrong.append("nobody speaks")
    if speakers and speakers[0] in alive:
        if len(reports) != 1 or not (folder / "report.json").is_file():
            wrong.append(f"{len(reports)} records with a report, report.json: {(folder / 'report.json').is_file()}")
        else:
            report = json.loads(reports[0].read_text())
            verdict = report["verdict"]
            closing = re.findall(r"^healthcheck: [A-Z].*", errors[speakers[0]], re.MULTILINE)[-1:]
            if nan_seen and verdict == "ok":
                wrong.append(f"OK over a NaN of rank {plan.bad}: {closing}")
            if (
                verdict == "ok"
                and (plan.unwatched >= 0 or dead)
                and "of this rank only" not in json.dumps(report) + str(closing)
            ):
                wrong.append(f"OK for ranks that it cannot see: {closing}")
            # A rank that sleeps where all meet at every step is slow, and to be named: not as wanted is any other alert.
            slow = [alert for alert in report["alerts"] if alert["rule"] == "slow-rank"]
            if wrongly := [
                a["facts"] for a in slow if not plan.every_step or str(a["facts"]["ranks"]) != slowest(plan)
            ]:
                wrong.append(f"said to be slow: {wrongly}")
            expected = "script failed" if dead and "lost" in how else "warned" if slow else "ok"
            if plan.bad < 0 and (verdict != expected or len(slow) < len(report["alerts"])):
                wrong.append(f"healthy, and said {verdict}: {closing}")
    for rank, text in errors.items():
        if fault := re.search(r'internal error.*|.* raised in .*|File "[^"]*/healthcheck/[^"]*\.py.*', text):
            wrong.append(f"a fault of ours on rank {rank}: {fault[0]}")
    return Outcome(wrong, "+".join(sorted(how)) or "nobody left", longest, verdict)


def slowest(plan: Plan) -> str:
    """The ranks that others wait for; empty if they are slow by less than a tenth of a second in twenty steps."""
    pace = max(plan.paces)
    ranks = [str(rank) for rank, its in enumerate(plan.paces) if its == pace]
    others = [its for its in plan.paces if its < pace]
    return ", ".join(ranks) if others and pace - max(others) >= 0.005 else ""


# --------------------------------------------------------------------------- the table


def name_of(plan: Plan) -> str:
    troubles = [
        "NaN" if plan.bad >= 0 else "",
        "" if plan.unwatched < 0 else "rank 0 unwatched" if plan.unwatched == 0 else "a rank unwatched",
        "a rank dies" if plan.dies >= 0 else "",
        "--observe" if plan.observe else "",
    ]
    return ", ".join(filter(None, troubles)) or "healthy"


def played(
    seeds: list[int], jobs: int, keep: Path | None = None, stall: float = STALL
) -> Iterator[tuple[int, Outcome]]:
    """The outcome of each seed, several at a time."""
    for seed, said in in_forks(seeds, jobs, lambda seed: asdict(one(seed, keep, stall))):
        yield seed, Outcome(**said) if said else Outcome(["the run itself could not be judged"], "?", 0.0, "")


def in_forks(runs: list[Any], jobs: int, play_one: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """What ``play_one`` says of each run, None if it fails: every one in a fork that forks its ranks."""
    waiting, running = list(reversed(runs)), dict[int, tuple[Any, int]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop()
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.write(writing, json.dumps(play_one(run)).encode())
                    code = 0
                finally:
                    os._exit(code)
            os.close(writing)
            running[child] = run, reading
        child, _ = os.wait()
        run, reading = running.pop(child)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        yield run, json.loads(said) if said else None


def one(seed: int, keep: Path | None = None, stall: float = STALL) -> Outcome:
    """Play the run of one seed; its folder goes away unless it is kept or something is wrong."""
    plan = plan_of(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-", dir=keep))
    codes = play(plan, folder)
    outcome = judged(plan, folder, codes, stall)
    if outcome.wrong:
        outcome.wrong.append(f"see {folder}")
    elif keep is None:
        shutil.rmtree(folder)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these runs instead")
    parser.add_argument("--stall", type=float, default=STALL, help="seconds that a step may take at most (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the folders of all runs there")
    parser.add_argument(
        "--allowance",
        type=float,
        metavar="SECONDS",
        help="of our own time, before the budget binds (0.02: ranks leave out steps)",
    )
    given = parser.parse_args()
    warm_up()
    if given.allowance is not None:
        from healthcheck.run import budget

        budget.ALLOWANCE = given.allowance  # the ranks are forks of this process
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    seeds = given.only or list(range(given.seed, given.seed + given.runs))
    rows: dict[tuple[str, str], list[Outcome]] = collections.defaultdict(list)
    wrong = 0
    for seed, outcome in played(seeds, given.jobs, given.keep, given.stall):
        plan = plan_of(seed)
        rows[name_of(plan), plan.kind].append(outcome)
        if given.keep is not None:
            print(plan)
        if outcome.wrong or given.only:
            wrong += bool(outcome.wrong)
            print(
                f"--- seed {seed}, {plan.world} ranks, {plan.kind}, {name_of(plan)}: {outcome.how}, {outcome.verdict}"
            )
            for text in outcome.wrong:
                print(f"    {text}", flush=True)
    print(f"commit {commit()}, seeds {seeds[0]} to {seeds[-1]}: {len(seeds)} runs, {wrong} wrong\n")
    print("| what is wrong with the run | ranks meet | runs | ended how | said | longest step | not as wanted |")
    print("|---|---|---|---|---|---|---|")
    for (trouble, kind), found in sorted(rows.items()):
        counted = [
            ", ".join(f"{n} {what}" for what, n in collections.Counter(values).most_common() if what)
            for values in ([o.how for o in found], [o.verdict for o in found])
        ]
        bad = sum(bool(o.wrong) for o in found)
        print(
            f"| {trouble} | {kind} | {len(found)} | {counted[0]} | {counted[1]} | {max(o.longest for o in found):.1f} s | {bad or ''} |"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
