"""``healthcheck doctor``: whether this environment can watch a run, and what is in the way.

With a script: what watching it costs here, and that it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from healthcheck.commands.doctor_checks import Finding, all_checks
from healthcheck.commands.doctor_script import STEPS, compare, run_trials
from healthcheck.commands.options import add_plugin_option
from healthcheck.errors import UsageError

NAME = "doctor"
HELP = "report on this environment: versions, devices, name clashes, plugins, rules"

_MARK = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script",
        nargs="?",
        metavar="SCRIPT",
        help="run its first steps with and without us in turn (six runs, as it stands, acting on nothing): step time, "
        "memory, identical losses",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run ({STEPS})")
    add_plugin_option(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: for scripts")


def main(args: argparse.Namespace) -> int:
    measured: dict[str, Any] = {}
    if args.script is None:
        findings = list(all_checks(args.plugins))
    else:
        if args.steps < 2:
            raise UsageError(f"--steps {args.steps}: at least 2 are needed")
        trials = run_trials(args.script, args.arguments, args.steps, say=lambda text: print(text, file=sys.stderr))
        measured, findings = compare(trials)
    problems = [f for f in findings if f.level == "problem"]
    if args.format == "json":
        content = {"problems": len(problems), "findings": [asdict(f) for f in findings]}
        print(json.dumps({**content, **({"measured": measured} if measured else {})}, indent=1))
    else:
        for finding in findings:
            print("\n".join(_lines(finding)))
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}" if problems else "no problems"
        print(f"healthcheck doctor: {count}")
    return 1 if problems else 0


def _lines(finding: Finding) -> list[str]:
    lines = [f"{_MARK[finding.level]} {finding.topic}: {finding.text}"]
    if finding.advice:
        lines.append(f"        try: {finding.advice}")
    return lines
