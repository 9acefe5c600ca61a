"""The figures of one card that have a target, in one command of at most eight minutes on an H100.

Trainers come last, for as long as there is time: give them more with ``benchmarks/trainers.py`` by itself.

    python benchmarks/gpu_table.py --json gpu.json
    python benchmarks/gpu_table.py --device cpu --blocks 2 --quick      the same code without a card

Prints what was measured as it comes, then a table: target, measured, met or missed. The tables of all variants are
in the JSON: ``python benchmarks/overhead.py --table gpu.json``. Parts that would pass the time are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from overhead import Row, measure
from overhead_checks import extra_memory, no_waits, nothing_attached, one_copy
from overhead_variants import VARIANTS

BASE = ("nothing", "nothing again")
DETAIL = "recommended + per parameter"
RATIO = "recommended + per parameter, update ratio every 10"


class Report:
    """Collects figures and says at once whether each meets its target."""

    def __init__(self, file: str | None, seconds: float) -> None:
        self.file = file
        self.ends = time.monotonic() + seconds
        self.tables: list[dict[str, Any]] = []
        self.checks: dict[str, Any] = {}
        self.lines: list[tuple[str, str, str, str]] = []

    def left(self) -> float:
        return self.ends - time.monotonic()

    def target(self, what: str, wanted: str, measured: str, met: bool | None) -> None:
        self.lines.append((what, wanted, measured, "not measured" if met is None else "met" if met else "MISSED"))
        print("  ", *self.lines[-1], sep=" | ", flush=True)

    def part(self, name: str, needs: float, run: Callable[[], None]) -> None:
        """Run one part if its time is left; an error is a line of the table, not the end."""
        if self.left() < needs:
            self.target(name, "", f"left out: {self.left():.0f} s left", None)
            return
        began = time.monotonic()
        print(f"# {name}", flush=True)
        try:
            run()
        except Exception as error:
            self.target(name, "", f"{type(error).__name__}: {error}".splitlines()[0][:200], None)
        print(f"# {name}: {time.monotonic() - began:.0f} s", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        if self.file:
            content = {"tables": self.tables, "checks": self.checks, "targets": self.lines}
            Path(self.file).write_text(json.dumps(content, indent=1))


def ratios(report: Report, case: str, large: bool, device: str, blocks: int, steps: int | None, seconds: float) -> None:
    """One case with its targets: those of the 124M model if ``large``, else of the launch-bound one."""
    names = ("no rules", DETAIL, RATIO) if large else ("no rules", "recommended", DETAIL)
    chosen = {name: VARIANTS[name] for name in (*BASE, *names)}
    table = measure(Row.parse(case), chosen, device=device, blocks=blocks, steps=steps, seconds=seconds)
    report.tables.append(table)
    rows = {row["variant"]: row for row in table["rows"]}
    enough = table["rows"][0]["blocks"] >= 30

    def judge(name: str, wanted: str, met: Callable[[dict[str, Any]], bool]) -> None:
        row = rows.get(name)
        if row is None:
            report.target(f"{case}: {name}", wanted, table["failed"].get(name, "did not run"), None)
            return
        text = f"{row['ratio']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"
        report.target(f"{case}: {name}", wanted, text, met(row) if enough else None)

    if large:
        judge(DETAIL, "median <= 1.005, upper end <= 1.01", lambda r: r["ratio"] <= 1.005 and r["high"] <= 1.01)
        judge(RATIO, "median <= 1.01", lambda r: r["ratio"] <= 1.01)
    else:
        judge("recommended", "median <= 1.02", lambda r: r["ratio"] <= 1.02)
    judge("no rules", "interval contains 1", lambda r: r["low"] <= 1 <= r["high"])
    judge("nothing again", "(noise)", lambda r: r["low"] <= 1 <= r["high"])


def statistics_of_gradients(report: Report) -> None:
    from gradstats import SHAPES
    from gradstats import measure as one_pass

    limits = {"150 tensors, 124M": 60, "1,000 tensors, 124M": 160}
    rows = []
    for name, (count, elements) in SHAPES.items():
        if name not in limits:
            continue
        row = one_pass(name, count, elements, torch.float32)
        rows.append(row)
        host, device, times = row["host_us"], row["device_over_floor"], row["total_norm_over_ours_host"]
        report.target(
            f"gradient statistics, {name}: host", f"< {limits[name]} us", f"{host:.0f} us", host < limits[name]
        )
        report.target(f"gradient statistics, {name}: device", "<= 1.3 of the floor", f"{device:.2f}", device <= 1.3)
        report.target(
            f"gradient statistics, {name}: host of get_total_norm", ">= 5 times ours", f"{times:.1f}", times >= 5
        )
        torch.cuda.empty_cache()
    report.checks["gradstats"] = rows


def attached(report: Report, device: str) -> None:
    found = report.checks["nothing attached"] = nothing_attached(device)
    report.target(
        "no rules: attached", "nothing", str({k: v for k, v in found.items() if k != "passed"}), found["passed"]
    )


def waits(report: Report, case: str) -> None:
    found = report.checks["no waits"] = no_waits(case)
    text = found["error"] or f"{found['steps']} steps, {found['judged']} judged"
    report.target(f'{case}: set_sync_debug_mode("error")', "no wait", text, found["passed"])


def copies(report: Report, case: str) -> None:
    found = report.checks["one copy"] = one_copy(case)
    wanted = f"at most {found['steps']} copies in {found['steps']} steps, no synchronize"
    report.target(f"{case}: profiler trace, ours", wanted, str(found["ours"]), found["passed"])


def memory(report: Report, case: str) -> None:
    found = report.checks["memory"] = extra_memory(case)
    text = f"{found['extra_mib']:.1f} MiB"
    report.target(f"{case}: extra device memory", f"<= {found['allowed_mib']:.0f} MiB", text, found["passed"])


def real_trainers(report: Report, device: str, seconds: float, only: list[str] | None) -> None:
    """HF Trainer, Lightning, Accelerate and a plain loop (``benchmarks/trainers.py``), every step watched."""
    import trainers

    rows = trainers.run(device, seconds, only=only, settings={"overhead_budget": "off"})
    report.checks["trainers"] = rows
    for name, row in rows.items():
        if "error" in row:
            report.target(f"trainer {name}", "median <= 1.02, upper end <= 1.04", row["error"], None)
            continue
        ratio, _, high = row["watched"]
        met = (ratio <= 1.02 and high <= 1.04) if row["resolved"] else None
        said = f"{trainers.shown(row['watched'])}, nothing again {trainers.shown(row['nothing again'])}"
        report.target(f"trainer {name}", "median <= 1.02, upper end <= 1.04", said, met)
        cost, says = ratio - 1.0, row["own"]
        near = abs(cost - says) <= 0.005 or max(cost, says) <= 1.5 * min(cost, says)
        report.target(
            f"trainer {name}: what it says of itself",
            "within 0.5 points or a factor of 1.5",
            f"{says:.1%}, measured {cost:.1%}",
            near if row["resolved"] else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=470, help="most time for all parts")
    parser.add_argument("--quick", action="store_true", help="small cases, to try the command out")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    card = args.device == "cuda"
    large, small = ("gpt-10m-cpu", "many-tiny") if args.quick else ("gpt-124m", "gpt-10m")
    report = Report(args.json, args.seconds)
    report.part("nothing attached", 1, lambda: attached(report, args.device))
    if card:
        report.part("no waits", 20, lambda: waits(report, small))
        report.part("one copy", 20, lambda: copies(report, small))
        report.part("gradient statistics", 30, lambda: statistics_of_gradients(report))
    report.part(
        "large model",
        120,
        lambda: ratios(report, large, True, args.device, args.blocks, None if args.quick else 6, args.seconds * 0.45),
    )
    report.part(
        "launch-bound model",
        60,
        lambda: ratios(report, small, False, args.device, args.blocks, None if args.quick else 10, args.seconds * 0.3),
    )
    if card:
        report.part("memory", 30, lambda: memory(report, large))
    only = ["loop-tiny"] if args.quick and not card else ["loop-10m"] if args.quick else None
    report.part("trainers", 30, lambda: real_trainers(report, args.device, report.left() - 15, only))
    print("\n| what | target | measured | |\n|---|---|---|---|")
    for line in report.lines:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
