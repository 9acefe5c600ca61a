"""``healthcheck profile SCRIPT``: ``healthcheck run`` with a profile of a few steps."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import entry_points

from healthcheck_performance.profiling import ProfileOptions, options_text

PLUGIN = "healthcheck_performance"
HELP = (
    "run a script under rules and profile a few of its steps: traces for Chrome and TensorBoard, a table of operators"
)


def main(argv: list[str]) -> int:
    """Returns the exit code of ``healthcheck run``."""
    default = ProfileOptions()
    parser = argparse.ArgumentParser("healthcheck profile", description=HELP, allow_abbrev=False)
    for name, help in (
        ("wait", "steps before each profile"),
        ("warmup", "steps that are slowed down and not recorded"),
        ("active", "steps to record"),
        ("repeat", "how many profiles"),
        ("rows", "operators in the table"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(default, name), metavar="N", help=f"{help} (%(default)s)"
        )
    parser.add_argument(
        "--tensorboard", default="", metavar="DIR", help="folder of the traces (default: profile in the record)"
    )
    parser.add_argument("--shapes", action="store_true", help="shapes of inputs in the trace")
    parser.add_argument("--stacks", action="store_true", help="Python stacks in the trace")
    parser.add_argument("--analyse", action="store_true", help="also say what the run is bound by, with its arithmetic")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what `healthcheck run` takes")
    args, ours = parser.parse_known_args(argv)  # options of `healthcheck run` come before the script
    given = [*ours, *args.rest]
    if not given:
        parser.error("the script is missing: healthcheck profile train.py")
    options = ProfileOptions(
        wait=args.wait,
        warmup=args.warmup,
        active=args.active,
        repeat=args.repeat,
        rows=args.rows,
        shapes=args.shapes,
        stacks=args.stacks,
        flops=args.analyse,
        folder=args.tensorboard,
    )
    environment = {**os.environ, "HEALTHCHECK_PERFORMANCE_PROFILE": options_text(options)}
    installed = any(point.name == PLUGIN for point in entry_points(group="healthcheck"))
    command = [sys.executable, "-m", "healthcheck", "run", *([] if installed else ["-p", PLUGIN]), *given]
    return subprocess.run(command, env=environment, check=False).returncode
