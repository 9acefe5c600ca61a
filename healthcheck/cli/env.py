"""``eval "$(healthcheck env)"``: the variables by which processes of a job file or a scheduler are watched."""

from __future__ import annotations

import argparse
import json
import os
import shlex

from healthcheck.cli import run
from healthcheck.cli.launch import options_of
from healthcheck.core.errors import UsageError

NAME = "env"
HELP = "variables that have Python processes watched, for job files and schedulers"

_USAGE = 'eval "$(healthcheck env [options of healthcheck run])"'


def configure(parser: argparse.ArgumentParser) -> None:
    run.configure(parser)
    parser.usage = _USAGE
    parser.add_argument("--json", action="store_true", help="as a JSON object, for environments that are data")


def main(args: argparse.Namespace) -> int:
    """Print them for a POSIX shell. Raises ``UsageError`` and ``RuleFileError`` for what a run would not take."""
    if args.target is not None or args.module:
        raise UsageError(f"healthcheck env: it starts nothing, so it takes no script; usage: {_USAGE}")
    from healthcheck.assembly import load_rules_for, running_host
    from healthcheck.cli.options import given_settings, rule_choice
    from healthcheck.record.job import Job

    load_rules_for(host=running_host(args.plugins), settings=given_settings(args), **rule_choice(args))
    variables = Job(options_of(args), None).variables(os.environ)
    if args.json:
        print(json.dumps(variables))
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0
