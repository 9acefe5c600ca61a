"""``healthcheck runs``: the recorded runs as a table; by rule or by script over many of them."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthcheck.errors import UsageError
from healthcheck.reports.runs import Run, all_runs, reading_folder
from healthcheck.reports.text import columns, duration, moment, plural, step

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
    oldest = parse_since(args.since)
    runs = [run for run in all_runs(folder) if _age(run) <= oldest]
    runs = runs[-args.n :] if args.n > 0 else runs
    made: Any
    table: Callable[[Any, list[Run]], list[str]]
    if args.by == "rule":
        made, table = by_rule(runs), _rule_table
    elif args.by == "script":
        made, table = by_script(runs), _script_table
    else:
        made, table = [run_row(run) for run in runs], _run_table
    if args.format == "json":
        print(json.dumps(made, indent=1, allow_nan=False))
        return 0
    if not runs:
        print(f"no runs in {folder}" + (f" within {args.since}" if args.since else ""))
        return 0
    print("\n".join(table(made, runs)))
    return 0


def parse_since(text: str | None) -> float:
    """``14d`` in seconds; infinity without a limit. Raises ``UsageError`` for another form."""
    if text is None:
        return float("inf")
    match = _SINCE.match(text.strip())
    if match is None:
        raise UsageError(f'--since "{text}": write a number with m, h, d or w, such as 14d')
    return float(match[1]) * _SECONDS[match[2]]


def _age(run: Run) -> float:
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
    return columns(table, "lllrrlrl", indent=0)


def by_rule(runs: list[Run]) -> dict[str, Any]:
    """Per rule: runs that it stopped, would have stopped, in which it failed or warned, was not judged."""
    rules: dict[str, dict[str, Any]] = {}
    noisy: dict[str, Counter[str]] = {}
    unjudged: list[str] = []
    for run in runs:
        entries = (run.report or {}).get("rules", {})
        if entries and all(entry["verdict"] == "not judged" for entry in entries.values()):
            unjudged.append(run.target)
        for rule, entry in entries.items():
            counts = rules.setdefault(rule, {"stopped": 0, "would_stop": 0, "fired": 0, "not_judged": 0})
            counts["fired"] += entry["verdict"] in ("failed", "warned")
            counts["not_judged"] += entry["verdict"] == "not judged"
        stop = (run.report or {}).get("stop") or {}
        if stop.get("rule") in rules:
            rules[stop["rule"]]["stopped"] += 1
        held = {
            str(a["rule"])
            for a in run.alerts
            if any(
                o["action"] == "stop" and o.get("held") and o["text"] == "observe mode" for o in a.get("actions", ())
            )
        }
        for rule in held & set(rules):
            rules[rule]["would_stop"] += 1
        for alert in run.alerts:
            noisy.setdefault(str(alert["rule"]), Counter())[run.target] += 1
    for rule, counts in rules.items():
        counts["noisiest"] = list(noisy[rule].most_common(1)[0]) if rule in noisy else None
    return {
        "runs": len(runs),
        "scripts": len({run.target for run in runs}),
        "rules": rules,
        "unjudged": sorted(set(unjudged)),
    }


def _rule_table(made: dict[str, Any], runs: list[Run]) -> list[str]:
    observed = all(run.facts.get("mode") == "observe" for run in runs)
    stopped = sum(counts["stopped"] for counts in made["rules"].values())
    head = f"{plural(made['runs'], 'run')} of {plural(made['scripts'], 'script')}"
    head += ", observe mode: nothing was stopped" if observed else f", {stopped} stopped"
    table = [["rule", "stopped", "would stop", "runs it fired in", "not judged", "noisiest script"]]
    quiet = 0
    for rule, counts in made["rules"].items():
        if not (counts["fired"] or counts["stopped"] or counts["would_stop"]):
            quiet += 1
            continue
        noisiest = f"{counts['noisiest'][0]} {counts['noisiest'][1]}" if counts["noisiest"] else ""
        cells = [str(counts[key] or "-") for key in ("stopped", "would_stop", "fired", "not_judged")]
        table.append([rule, *cells, noisiest])
    lines = [head, *columns(table, "lrrrrl")] if len(table) > 1 else [head]
    lines.append(f"  {plural(quiet, 'rule')} never fired")
    if made["unjudged"]:
        lines.append(f"  scripts that ran without any rule being judged: {', '.join(made['unjudged'])}")
    unfinished = sum(1 for run in runs if run.report is None)
    if unfinished:
        lines.append(
            f"  {plural(unfinished, 'run')} without a report (running or killed): alerts counted, verdicts not"
        )
    return lines


def by_script(runs: list[Run]) -> list[dict[str, Any]]:
    """Per script: runs, how they ended, its most frequent rule."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.target, []).append(run)
    rows = []
    for script, own in found.items():
        fired = Counter(str(a["rule"]) for run in own for a in run.alerts if not a.get("explained_by"))
        status = Counter(run.status for run in own)
        top = fired.most_common(1)
        rows.append(
            {"script": script, "runs": len(own), "status": dict(status), "most_frequent": list(top[0]) if top else None}
        )
    return rows


def _script_table(made: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    states = list(dict.fromkeys(state for row in made for state in row["status"]))
    table = [["script", "runs", *states, "most frequent alert"]]
    for row in made:
        top = f"{row['most_frequent'][0]} {row['most_frequent'][1]}" if row["most_frequent"] else ""
        table.append([row["script"], str(row["runs"]), *(str(row["status"].get(s, "-")) for s in states), top])
    return columns(table, "l" + "r" * (1 + len(states)) + "l", indent=0)
