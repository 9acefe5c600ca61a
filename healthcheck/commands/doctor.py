"""``healthcheck doctor``: whether this environment can watch a run, and what is in the way."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from healthcheck.commands.doctor_checks import Finding, all_checks

NAME = "doctor"
HELP = "report on this environment: versions, devices, name clashes, plugins, rules"
GROUP = "Extend"

_MARK = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--plugin", action="append", default=[], metavar="FILE_OR_MODULE", help="also load this plugin"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def main(args: argparse.Namespace) -> int:
    findings = list(all_checks(args.plugin))
    problems = [f for f in findings if f.level == "problem"]
    if args.format == "json":
        print(json.dumps({"problems": len(problems), "findings": [asdict(f) for f in findings]}, indent=1))
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
