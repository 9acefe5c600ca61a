"""``healthcheck runs``: the recorded runs as a table; by rule or by script over many of them."""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthcheck.cli.choosing import age, parse_since
from healthcheck.cli.options import add_format, add_records_folder, loaded_host, print_json, records_folder
from healthcheck.core.errors import UsageError
from healthcheck.core.text import decode_number, duration, encode_number, moment, number, plural, shorten, step
from healthcheck.record.runs import Run, all_runs, find_run, summaries
from healthcheck.reports.tables import table_lines
from healthcheck.reports.wording import would_have_stopped

NAME = "runs"
HELP = "the recorded runs; --by rule shows which rules fire, --by script which scripts"


def configure(parser: argparse.ArgumentParser) -> None:
    add_records_folder(parser)
    parser.add_argument("--by", choices=("rule", "script"), help="sum up over runs")
    parser.add_argument("--since", metavar="AGE", help="only runs that began within this time: 14d, 36h, 2w")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="what differs between two runs, side by side")
    parser.add_argument("-n", type=int, default=0, metavar="N", help="only the newest N runs")
    add_format(parser)


def main(args: argparse.Namespace) -> int:
    if args.compare:
        both = compared(*map(find_run, args.compare))
        if args.format == "json":
            print_json(both)
        else:
            print("\n".join(compared_table(both)))
        return 0
    folder = records_folder(args)
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
        made, table = summaries(folder, runs, run_row), _run_table
    if args.format == "json":
        print_json(made)
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


# --------------------------------------------------------------------------- two runs side by side

SIDE_BY_SIDE = ("loss", "eval.loss", "grad_norm", "lr", "throughput", "time.step", "memory.allocated")
"""Metrics whose last values are compared."""


def compared(one: Run, other: Run) -> dict[str, Any]:
    """What two runs were, how they ended, what fired in them, and their last values; only what differs or is a number.

    ``facts``, ``metrics`` and ``rules``: name -> the value of each run, None where it has none.
    """
    pair = (one, other)
    units = loaded_host().registry.units()
    facts = {name: [fact(run) for run in pair] for name, fact in _FACTS.items()}
    versions = [run.facts.get("versions", {}) for run in pair]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        facts[f"{name} version"] = [known.get(name) for known in versions]
    last: list[dict[str, float]] = []
    for run in pair:
        values: dict[str, float] = {}
        for batch in run.samples.batches:
            values.update({sample.metric: sample.value for sample in batch.samples if not sample.labels})
        last.append(values)
    metrics = {name: [encode_number(known.get(name)) for known in last] for name in SIDE_BY_SIDE}
    verdicts = [{rule: str(e["verdict"]) for rule, e in (run.report or {}).get("rules", {}).items()} for run in pair]
    rules = {rule: [known.get(rule) for known in verdicts] for rule in dict.fromkeys([*verdicts[0], *verdicts[1]])}
    return {
        "runs": [run.name for run in pair],
        "facts": {name: both for name, both in facts.items() if both[0] != both[1]},
        "metrics": {name: both for name, both in metrics.items() if both != [None, None]},
        "rules": {rule: both for rule, both in rules.items() if both[0] != both[1]},
        "units": {name: units.get(name, "") for name in metrics},
    }


_FACTS: dict[str, Callable[[Run], Any]] = {
    "script": lambda run: run.target,
    "command": lambda run: " ".join(map(str, run.facts.get("argv", ()))),
    "verdict": lambda run: run.status,
    "steps": lambda run: run.steps,
    "seconds": lambda run: (run.report or {}).get("seconds"),
    "ranks": lambda run: run.facts.get("world_size"),
    "rules from": lambda run: run.facts.get("rules_source"),
    "alerts": lambda run: ", ".join(dict.fromkeys(str(a["rule"]) for a in run.alerts if not a.get("explained_by"))),
    "host": lambda run: run.facts.get("host"),
}


def compared_table(made: dict[str, Any]) -> list[str]:
    """Three blocks in one table: what the runs were, their last values, the rules that ended differently."""

    def shown(value: Any, unit: str | None = None) -> str:
        if value is None:
            return "-"
        if unit is not None:
            return number(decode_number(value), unit)
        return f"{value:,}" if isinstance(value, (int, float)) else str(value)

    rows = [[name, *map(shown, both)] for name, both in made["facts"].items()]
    for name, both in made["metrics"].items():
        unit = made["units"][name]
        rows.append([f"last {name}", *(shown(value, unit) for value in both)])
    rows += [[f"rule {rule}", *map(shown, both)] for rule, both in made["rules"].items()]
    same = "the runs do not differ in anything that the records know of"
    return table_lines(rows, "lll", heads=("", *made["runs"]), indent=0) or [same]


def _run_table(rows: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    table = []
    for row, run in zip(rows, runs, strict=True):
        began = moment(run.began)[5:]
        alerts = ", ".join(row["rules"][:3]) + (" ..." if len(row["rules"]) > 3 else "")
        took = duration(row["seconds"]) if row["seconds"] is not None else "-"
        code = str(row["exit_code"]) if row["exit_code"] is not None else "-"
        table.append([row["name"], row["script"], began, step(row["steps"]), took, row["status"], code, alerts])
    return table_lines(
        table, "lllrrlrl", heads=("run", "script", "began", "steps", "took", "verdict", "exit", "alerts"), indent=0
    )


# --------------------------------------------------------------------------- many runs summed up

NOISY = 0.25
"""A rule that warned in this part of the runs is worth tuning: it is either too eager or true everywhere."""
ENOUGH_RUNS = 4


def by_rule(runs: list[Run]) -> dict[str, Any]:
    """Per rule: runs that it stopped, would have stopped, in which it failed or warned, was not judged."""
    rules: dict[str, dict[str, Any]] = {}
    noisy: dict[str, Counter[str]] = {}
    unjudged: set[str] = set()
    judged: set[str] = set()
    warned: Counter[str] = Counter()
    for run in runs:
        entries = (run.report or {}).get("rules", {})
        silent = entries and all(entry["verdict"] == "not judged" for entry in entries.values())
        (unjudged if silent else judged).add(run.target)
        for rule, entry in entries.items():
            counts = rules.setdefault(rule, {"stopped": 0, "would_stop": 0, "fired": 0, "not_judged": 0})
            counts["fired"] += bool(entry.get("episodes"))
            counts["not_judged"] += entry["verdict"] == "not judged"
        stop = (run.report or {}).get("stop") or {}
        if stop.get("rule") in rules:
            rules[stop["rule"]]["stopped"] += 1
        for rule in {str(alert["rule"]) for alert in run.alerts if would_have_stopped(alert)} & set(rules):
            rules[rule]["would_stop"] += 1
        warned.update({str(a["rule"]) for a in run.alerts if a["severity"] == "warning" and not a.get("explained_by")})
        for alert in run.alerts:
            noisy.setdefault(str(alert["rule"]), Counter())[run.target] += 1
    for rule, counts in rules.items():
        counts["noisiest"] = list(noisy[rule].most_common(1)[0]) if rule in noisy else None
    return {
        "runs": len(runs),
        "scripts": len({run.target for run in runs}),
        "rules": rules,
        "consider_tuning": [
            rule for rule, n in warned.most_common() if len(runs) >= ENOUGH_RUNS and n >= NOISY * len(runs)
        ],
        "unjudged": sorted(unjudged - judged),
    }


def rule_table(made: dict[str, Any], runs: list[Run], since: str | None = None) -> list[str]:
    """The table, most frequent first, and what to do next."""
    observed = all(run.facts.get("mode") == "observe" for run in runs)
    stopped = sum(counts["stopped"] for counts in made["rules"].values())
    head = f"{plural(made['runs'], 'run')} of {plural(made['scripts'], 'script')}"
    head += ", observe mode: nothing was stopped" if observed else f", {stopped} stopped"
    table = []
    loud = [(rule, c) for rule, c in made["rules"].items() if c["fired"] or c["stopped"] or c["would_stop"]]
    quiet = len(made["rules"]) - len(loud)
    for rule, counts in sorted(loud, key=lambda item: -item[1]["fired"]):
        noisiest = f"{counts['noisiest'][0]} {counts['noisiest'][1]}" if counts["noisiest"] else ""
        cells = [str(counts[key] or "-") for key in ("stopped", "would_stop", "fired", "not_judged")]
        table.append([rule, *cells, noisiest])
    heads = ("rule", "stopped", "would stop", "runs it fired in", "not judged", "noisiest script")
    lines = [head, *table_lines(table, "lrrrrl", heads=heads)]
    lines.append(f"  {plural(quiet, 'rule')} never fired")
    if made["unjudged"]:
        lines.append(f"  scripts that ran without any rule being judged: {', '.join(made['unjudged'])}")
    unfinished = sum(1 for run in runs if run.report is None)
    if unfinished:
        lines.append(
            f"  {plural(unfinished, 'run')} without a report (running or killed): alerts counted, verdicts not"
        )
    return [*lines, *_next_steps(made, observed, since)]


def _next_steps(made: dict[str, Any], observed: bool, since: str | None) -> list[str]:
    """Which rule to tune with which line, and how to enforce what was only observed."""
    lines = []
    noisy = made["consider_tuning"]
    if noisy:
        lines.append(
            f"  consider tuning: {shorten(noisy)}    healthcheck replay --since {since or '14d'} --only {noisy[0]}"
        )
    if observed and made["runs"]:
        lines.append("  to enforce: delete `mode: observe` from healthcheck.yaml, or set it per rule")
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


def script_table(made: list[dict[str, Any]], runs: list[Run]) -> list[str]:
    states = list(dict.fromkeys(state for row in made for state in row["status"]))
    table = []
    for row in made:
        top = f"{row['most_frequent'][0]} {row['most_frequent'][1]}" if row["most_frequent"] else ""
        table.append([row["script"], str(row["runs"]), *(str(row["status"].get(s, "-")) for s in states), top])
    heads = ("script", "runs", *states, "most frequent alert")
    return table_lines(table, "l" + "r" * (1 + len(states)) + "l", heads=heads, indent=0)
