"""``healthcheck accept RUN --reason ...``: take the alerts of a run as known; later only new ones fail."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from healthcheck.cli.options import add_run
from healthcheck.core.errors import UsageError
from healthcheck.core.text import plural, suggest
from healthcheck.record.runs import find_run
from healthcheck.reports.wording import by_cause

NAME = "accept"
HELP = "take the alerts of a run as known (healthcheck-accepted.yaml); later only new ones fail"


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("rules", nargs="*", metavar="RULE", help="only these rules (default: all that alerted)")
    parser.add_argument(
        "--reason", required=True, help="why they are acceptable; written to the file and shown in reports"
    )
    parser.add_argument("--any-script", action="store_true", help="for every script, not only the one of this run")
    parser.add_argument("--force", action="store_true", help="also accept alerts that stopped the run")


def main(args: argparse.Namespace) -> int:
    from healthcheck.rulelang.accepted import FILE_NAME, Acceptance, add_accepted, find_accepted

    if not args.reason.strip():
        raise UsageError("healthcheck accept: --reason must not be empty: it is all that the next reader has")
    run = find_run(args.run)
    alerts = _chosen(run.alerts, args.rules)
    # An accepted alert no longer fails a run, but its actions still run: accepting a stop would promise what does not happen.
    stopping = sorted({a["rule"] for a in alerts if any(o["action"] == "stop" and o["done"] for o in a["actions"])})
    if stopping and not args.force:
        raise UsageError(
            f"healthcheck accept: {', '.join(stopping)} stopped this run, and would stop the next one too; "
            "switch the rule off or mute its span, or give --force"
        )
    script = "*" if args.any_script else run.target
    today = time.strftime("%Y-%m-%d")
    # One entry for each series: another parameter that goes the same way tomorrow is news.
    entries = [
        Acceptance(part["rule"], args.reason.strip(), series["name"], script, today)
        for part in alerts
        for series in part["series"]
    ]
    path = find_accepted(Path.cwd()) or Path(FILE_NAME)
    added = add_accepted(path, entries)
    for entry in added:
        print(f"accepted {entry.rule} on {entry.series}" + ("" if script == "*" else f" in {script}"))
    if not added:
        print(f"nothing new: {path} covers all alerts of {run.name} already" if alerts else f"{run.name} has no alerts")
    else:
        print(f"{plural(len(added), 'entry', 'entries')} added to {path}; commit it")
    return 0


def _chosen(alerts: list[dict[str, Any]], rules: list[str]) -> list[dict[str, Any]]:
    """What the named rules or causes (``rule.cause``) found; all that counts without names. One entry per cause."""
    known = {name for alert in alerts for name in (alert["rule"], *(part["rule"] for part in by_cause(alert)))}
    for rule in rules:
        if rule not in known:
            raise UsageError(
                f'healthcheck accept: "{rule}" has no alert in this run; '
                + (suggest(rule, known) or f"there are {', '.join(sorted(known)) or 'none'}")
            )
    return [
        part
        for alert in alerts
        for part in by_cause(alert)
        if not part.get("muted")
        and not part.get("accepted")
        and (not rules or {alert["rule"], part["rule"]} & {*rules})
    ]
