"""``healthcheck runs``: the recorded runs as a table; by rule or by script over many of them."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthcheck.commands.runs_summed import by_rule, by_script, rule_table, script_table
from healthcheck.errors import UsageError
from healthcheck.record.runs import Run, all_runs, reading_folder
from healthcheck.reports.text import columns, duration, moment, no_wider_than, step

NAME = "runs"
HELP = "the recorded runs; --by rule shows which rules fire, --by script which scripts"

_SINCE = re.compile(r"^(\d+(?:\.\d+)?)\s*([mhdw])$")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="folder of records (default: HEALTHCHECK_RUNS, else healthcheck-runs)",
    )
    parser.add_argument("--by", choices=("rule", "script"), help="sum up over runs")
    parser.add_argument("--since", metavar="AGE", help="only runs that began within this time: 14d, 36h, 2w")
    parser.add_argument("-n", type=int, default=0, metavar="N", help="only the newest N runs")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for scripts")


def main(args: argparse.Namespace) -> int:
    folder = Path(args.folder) if args.folder else reading_folder()
    if args.folder and not folder.is_dir():
        raise UsageError(f"healthcheck runs: there is no folder {folder}")
    oldest = parse_since(args.since)
    runs = [run for run in all_runs(folder) if age(run) <= oldest]
    runs = runs[-args.n :] if args.n > 0 else runs
    made: Any
    table: Callable[[Any, list[Run]], list[str]]
    if args.by == "rule":
        made, table = by_rule(runs), functools.partial(rule_table, since=args.since)
    elif args.by == "script":
        made, table = by_script(runs), script_table
    else:
        made, table = [run_row(run) for run in runs], _run_table
    if args.format == "json":
        print(json.dumps(made, indent=1, allow_nan=False))
        return 0
    if not runs:
        print(_none(folder, args.since))
        return 0
    print("\n".join(table(made, runs)))
    return 0


def _none(folder: Path, since: str | None) -> str:
    """Why there is nothing to show: no folder, none that may be read, none young enough."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} cannot be read: check its permissions"
    if since and all_runs(folder):
        return f"no runs in {folder} within {since}"
    return f"no runs in {folder}; `healthcheck run train.py` makes one (HEALTHCHECK_RUNS names another folder)"


def parse_since(text: str | None, option: str = "--since") -> float:
    """``14d`` in seconds; infinity without a limit. Raises ``UsageError`` for another form."""
    if text is None:
        return float("inf")
    match = _SINCE.match(text.strip())
    if match is None:
        raise UsageError(f'{option} "{text}": write a number with m, h, d or w, such as 14d')
    return float(match[1]) * _SECONDS[match[2]]


def age(run: Run) -> float:
    """Seconds since it began."""
    return time.time() - run.began


def run_row(run: Run) -> dict[str, Any]:
    """What the table says of one run."""
    report = run.report or {}
    alerts = run.alerts
    return {
        "name": run.name,
        "script": run.target,
        "started": run.facts.get("started"),
        "status": run.status,
        "steps": run.steps,
        "seconds": report.get("seconds"),
        "exit_code": report.get("exit_code"),
        "exit_reason": report.get("exit_reason"),
        "mode": run.facts.get("mode"),
        "alerts": len([a for a in alerts if not a.get("explained_by")]),
        "rules": list(dict.fromkeys(str(a["rule"]) for a in alerts if not a.get("explained_by"))),
        "folder": str(run.folder),
    }


def _run_table(rows: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    table = [["run", "script", "began", "steps", "took", "verdict", "exit", "alerts"]]
    for row, run in zip(rows, runs, strict=True):
        began = moment(run.began)[5:]
        alerts = ", ".join(row["rules"][:3]) + (" ..." if len(row["rules"]) > 3 else "")
        took = duration(row["seconds"]) if row["seconds"] is not None else "-"
        code = str(row["exit_code"]) if row["exit_code"] is not None else "-"
        table.append([row["name"], row["script"], began, step(row["steps"]), took, row["status"], code, alerts])
    return no_wider_than(columns(table, "lllrrlrl", indent=0), sys.stdout)
