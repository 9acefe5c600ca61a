"""What watching costs: step time with and without it, interleaved in one process.

    python benchmarks/overhead.py --rows gpt-124m --blocks 40 --json out.json
    python benchmarks/overhead.py --rows gpt-10m-cpu --device cpu --variants "nothing again,recommended"
    python benchmarks/overhead.py --table out.json          the tables of a run as Markdown

A row is a case, with ``+compile`` and ``+fused`` where wanted: ``gpt-124m+compile``. Every variant has a model,
optimizer and session of its own, all alive at the same time. A round runs one block of steps of each variant, in
random order; the ratio of a variant in a round is its block's time over that of the block without anything in the
same round. Printed: median of the ratios and its 95 % bootstrap interval. ``nothing again`` is a second copy
without anything: what it shows is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from overhead_models import CASES, Case
from overhead_tables import line, print_tables, rows_of
from overhead_variants import GROUPS, VARIANTS, Plain, Setup

import healthcheck
from healthcheck.run import budget

Maker = Callable[[Setup], Plain]


@dataclass(frozen=True, slots=True)
class Row:
    """One case, compiled or not, with fused AdamW or torch's default."""

    case: str
    compiled: bool = False
    fused: bool = False

    @classmethod
    def parse(cls, text: str) -> Row:
        """``gpt-124m+compile+fused``. Raises ``SystemExit`` with the known names."""
        case, *options = text.split("+")
        if case not in CASES or not set(options) <= {"compile", "fused"}:
            raise SystemExit(f'no row "{text}"; cases: {", ".join(CASES)}, each with +compile, +fused')
        return cls(case, "compile" in options, "fused" in options)


@dataclass(slots=True)
class Running:
    """One variant with its model, and the seconds per step of its blocks."""

    name: str
    step: Callable[[], None]
    turn: Callable[[], contextlib.AbstractContextManager[Any]]
    close: Callable[[], None]
    times: list[float] = field(default_factory=list)


def start(name: str, maker: Maker, case: Case, row: Row, device: str) -> Running:
    """Build one variant with its own model of the same seed."""
    torch.manual_seed(0)
    model = case.build().to(device)
    forward = torch.compile(model) if row.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=row.fused or None)
    data = case.data(device)
    variant = maker(Setup(model, optimizer))
    steps_with = variant.optimizer

    def step() -> None:
        variant.before()
        with variant.around():
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext():
                loss = forward(data)
            loss.backward()
        variant.backward_done(loss)
        steps_with.step()
        variant.stepped(loss)

    return Running(name, step, variant.turn, variant.close)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def block(running: Running, steps: int, device: str, clock: Callable[[], float]) -> float:
    """Seconds of so many steps, with an idle device before and after."""
    wait(device)
    with running.turn():
        began = clock()
        for _ in range(steps):
            running.step()
        wait(device)
        return clock() - began


def measure(
    row: Row,
    variants: Mapping[str, Maker],
    *,
    device: str,
    blocks: int,
    steps: int | None = None,
    clock: str = "wall",
    seconds: float | None = None,
) -> dict[str, Any]:
    """One table: facts and rows. A variant that fails is named with its error; the others go on.

    :param clock: ``wall``, or ``cpu``: time of the processors in this process, which other load hardly touches.
    :param seconds: begin no further round after so long; the table says how many there were.
    """
    case = CASES[row.case]
    steps = steps or case.steps
    tick = time.process_time if clock == "cpu" else time.perf_counter
    failed: dict[str, str] = {}
    running: list[Running] = []
    for name, maker in variants.items():
        try:
            one = start(name, maker, case, row, device)
            block(one, max(12, steps) if device == "cuda" else 3, device, tick)
        except Exception as error:
            if name == "nothing":
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            print(f"{name:52} left out: {failed[name]}", flush=True)
            continue
        running.append(one)
    chance = random.Random(1)
    gc.collect()
    ends = time.monotonic() + (seconds or float("inf"))
    for done in range(blocks):
        if done and time.monotonic() > ends:
            break
        for one in chance.sample(running, len(running)):
            one.times.append(block(one, steps, device, tick) / steps)
    rows = rows_of({one.name: one.times for one in running})
    for one, found in zip(running, rows, strict=True):
        print(line(found), flush=True)
        one.close()
    parameters = list(case.build().parameters())
    return {
        "case": row.case,
        "compiled": row.compiled,
        "fused": row.fused,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "steps": steps,
        "clock": clock,
        **facts(device),
        "rows": rows,
        "failed": failed,
    }


def facts(device: str) -> dict[str, str]:
    """Card, versions, commit, command and date of this run."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()}), {_threads()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "healthcheck": healthcheck.__version__,
        "commit": _commit(),
        "command": " ".join(["python", *("'" + a + "'" if " " in a else a for a in sys.argv)]),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    """``e02f060-dirty``; empty where this is no checkout, or git is not there."""
    ask = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(ask, cwd=Path(__file__).resolve().parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count != 1 else ''}"


def chosen(
    text: str, without: str, known: Mapping[str, Maker], groups: Mapping[str, tuple[str, ...]]
) -> dict[str, Maker]:
    """The variants of a list of names and groups, ``nothing`` first. Raises ``SystemExit`` for unknown names."""
    wanted = dict.fromkeys(["nothing"])
    drop: set[str] = set()
    for given, add in ((text, True), (without, False)):
        for name in _names(given, known, groups):
            members = groups.get(name, (name,))
            if add:
                wanted.update(dict.fromkeys(members))
            else:
                drop.update(members)
    return {name: known[name] for name in wanted if name not in drop}


def _names(text: str, known: Mapping[str, Maker], groups: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Split at commas; names of variants hold commas themselves, so the longest known one wins."""
    names = []
    rest = text.strip()
    while rest:
        fits = [n for n in (*known, *groups) if rest == n or rest.startswith(n + ",")]
        if not fits:
            raise SystemExit(f'no variant "{rest}"; variants: {"; ".join(known)}; groups: {", ".join(groups)}')
        name = max(fits, key=len)
        names.append(name)
        rest = rest[len(name) :].lstrip(", ")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="gpt-10m", help="cases, separated by commas")
    parser.add_argument("--variants", default="nothing again,ours,habits,callbacks", help="names or groups, by commas")
    parser.add_argument("--without", default="", help="variants or groups to leave out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, help="steps of a block")
    parser.add_argument(
        "--seconds", type=float, help="most time for the blocks of a row; fewer blocks are then reported"
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: time of the processors")
    parser.add_argument(
        "--allowance",
        type=float,
        metavar="SECONDS",
        help="of our own time, before the budget binds; else that of every run: 0.02 shows a long run, which has used it up",
    )
    parser.add_argument("--peers", metavar="FOLDER", help="packages for the group `peers`")
    parser.add_argument("--json", metavar="FILE", help="written after every row")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print what earlier runs wrote, and end")
    args = parser.parse_args()
    if args.table:
        print_tables(args.table)
        return
    if args.allowance is not None:
        budget.ALLOWANCE = args.allowance
    known, groups, versions = dict(VARIANTS), dict(GROUPS), {}
    if args.peers:
        from overhead_peers import peers

        others, versions = peers(Path(args.peers))
        known |= others
        groups["peers"] = tuple(others)
    variants = chosen(args.variants, args.without, known, groups)
    tables = []
    for row in [Row.parse(text) for text in args.rows.split(",")]:
        torch.compiler.reset()  # or shapes of the row before would be taken for shapes that change
        print(f"# {row.case}{' +compile' if row.compiled else ''}{' +fused' if row.fused else ''}", flush=True)
        table = measure(
            row,
            variants,
            device=args.device,
            blocks=args.blocks,
            steps=args.steps,
            clock=args.clock,
            seconds=args.seconds,
        )
        tables.append({**table, "packages": versions})
        if args.json:
            Path(args.json).write_text(json.dumps({"tables": tables}, indent=1))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
