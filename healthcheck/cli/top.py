"""``healthcheck top``: a run that goes on in another terminal, watched through its record. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping

from healthcheck.cli.options import add_run, loaded_host
from healthcheck.cli.outlet import raw
from healthcheck.core.errors import UsageError
from healthcheck.core.text import duration, step
from healthcheck.record.runs import Follower, Run, find_run, load_run
from healthcheck.reports.screen import Screen, screen_lines

NAME = "top"
HELP = "watch a run in progress: progress, loss and its course, newest values beside the usual ones, alerts"

WIDTH = 100
"""Characters of a line in a pipe or a file."""
QUIET_SECONDS = 10.0
"""Silence of the record from which it is said."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--every", default="2", metavar="SECONDS", help="how often to look (default 2)")
    parser.add_argument("--once", action="store_true", help="print once and leave, as without a terminal")


def main(args: argparse.Namespace) -> int:
    every = _seconds(args.every)
    run = find_run(args.run)
    units = loaded_host().registry.units()
    follower = Follower(run)
    if args.once or not sys.stdout.isatty():
        follower.look()
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
        print("\n".join(screen(load_run(run.folder), follower, units, width)))
        return 0
    try:
        _live(run, follower, units, every)
    except KeyboardInterrupt:
        pass
    return 0


def _live(run: Run, follower: Follower, units: Mapping[str, str], every: float) -> None:
    """Draw over and over until the run has ended; the last picture stays."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(file=raw(sys.stdout)), auto_refresh=False) as live:
        while True:
            now = load_run(run.folder)  # samples are followed line by line; report and alerts are small and read anew
            ended = now.status not in ("running", "unfinished")  # asked before drawing: the last picture says how
            follower.look()
            lines = screen(now, follower, units, live.console.width)
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            if ended:
                return
            time.sleep(every)


def screen(run: Run, follower: Follower, units: Mapping[str, str], width: int) -> list[str]:
    """All lines: the state of the run, its values, the newest alerts."""
    silent = follower.silent
    quiet = f", nothing new for {duration(silent)}" if run.report is None and silent >= QUIET_SECONDS else ""
    firing = [
        f"{alert['rule']} fires since step {step(alert['fired_step'])}"
        for alert in run.alerts
        if alert.get("cleared_step") is None and not alert.get("explained_by") and run.report is None
    ]
    return screen_lines(
        Screen(
            f"{run.name}, {run.target}",
            run.status,
            max(follower.step, run.steps),
            {name: list(series.values) for name, series in follower.series.items()},
            units,
            run.alerts,
            firing[:4],
            beside=quiet,
            blocks=sys.stdout.isatty() and "utf" in str(sys.stdout.encoding).lower(),
        ),
        width,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"healthcheck top: --every takes seconds from 0.1 to 3600, not {text!r}")
    return seconds
