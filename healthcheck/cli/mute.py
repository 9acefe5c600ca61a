"""``healthcheck mute``: silence a rule of a run in progress, for some steps and with a reason. Torch-free."""

from __future__ import annotations

import argparse

from healthcheck.cli.options import loaded_host
from healthcheck.core.errors import Problem, RuleFileError, UsageError
from healthcheck.core.text import plural
from healthcheck.record.requests import LOOK_SECONDS, ask_to_mute
from healthcheck.record.runs import find_run

NAME = "mute"
HELP = "silence a rule of a run in progress: judged and recorded, but no action, and not counted"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run in progress (`latest`)")
    parser.add_argument("rule", metavar="RULE", help="id of a rule, one cause of it (RULE.CAUSE), or a glob")
    parser.add_argument("--for", dest="steps", type=int, required=True, metavar="STEPS", help="how many steps from now")
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why; it is shown in the report")
    parser.add_argument("--force", action="store_true", help="also a rule for NaN and infinity")


def main(args: argparse.Namespace) -> int:
    from healthcheck.rulelang.compile import load_all
    from healthcheck.rulelang.overrides import flag_mutes

    run = find_run(args.run)
    if run.status not in ("running", "unfinished"):
        raise UsageError(
            f"healthcheck mute: {run.name} has ended ({run.status}); for the next one: --mute {args.rule}@A..B"
        )
    if args.steps < 1 or not args.reason.strip():
        raise UsageError("healthcheck mute: --for takes a number of steps from 1, and --reason some words")
    known = load_all([str(run.rules_file)], registry=loaded_host().registry).merged.rules
    problems: list[Problem] = []
    flag_mutes([args.rule], known, args.force, problems)
    if problems:
        raise RuleFileError(problems)
    try:
        ask_to_mute(run.folder, args.rule, args.steps, args.reason.strip())
    except OSError as error:
        raise UsageError(f"healthcheck mute: {run.folder} cannot be written ({error.strerror})") from None
    print(f"asked {run.name} to mute {args.rule} for {plural(args.steps, 'step')}; it looks every {LOOK_SECONDS:g} s")
    return 0
