"""``healthcheck top``: a run that goes on in another terminal, watched through its record. Torch-free."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from healthcheck.cli.options import add_run, loaded_host
from healthcheck.cli.outlet import raw
from healthcheck.core.errors import UsageError
from healthcheck.core.text import duration, number, plural, step, visible
from healthcheck.record.runs import Follower, Run, find_run, load_run
from healthcheck.reports.recorded import FIRST
from healthcheck.reports.tables import table_lines

NAME = "top"
HELP = "watch a run in progress: newest values beside the usual ones, alerts so far"

# With its heads and alerts the picture fits a window of 40 lines; rich cannot scroll what it draws over.
MOST_ROWS = 24
MOST_ALERTS = 5
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
        print("\n".join(screen(load_run(run.folder), follower, units)))
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
            live.update(Text.from_ansi("\n".join(screen(now, follower, units))), refresh=True)
            if ended:
                return
            time.sleep(every)


def screen(run: Run, follower: Follower, units: Mapping[str, str]) -> list[str]:
    """All lines: the state of the run, a row per series, the newest alerts."""
    silent = follower.silent
    quiet = f", nothing new for {duration(silent)}" if run.report is None and silent >= QUIET_SECONDS else ""
    named = visible(f"{run.name}: {run.target}, {run.status}")
    lines = [f"{named}, step {step(max(follower.step, run.steps))}{quiet}"]
    rows = []
    for name in _chosen(follower):
        series = follower.series[name]
        unit = units.get(series.metric, "")
        at, last = series.values[-1]
        rows.append([name, number(last, unit), number(series.usual, unit), step(at)])
    lines += table_lines(rows, "lrrr", heads=("metric", "last", "usual", "at step")) or ["  no samples yet"]
    if len(follower.series) > MOST_ROWS:
        lines.append(f"  {plural(len(follower.series) - MOST_ROWS, 'more metric')}: healthcheck metrics {run.name}")
    shown = [alert for alert in run.alerts if not alert.get("explained_by")]
    lines += ["", f"{plural(len(shown), 'alert')}" + (": healthcheck why" if shown else "")]
    lines += table_lines(
        [
            [
                str(alert["severity"]),
                str(alert["rule"]),
                f"step {step(alert['fired_step'])}",
                str(alert.get("message", "")),
            ]
            for alert in shown[-MOST_ALERTS:]
        ]
    )
    return lines


def _chosen(follower: Follower) -> Sequence[str]:
    """Series in the order in which most readers look for them; constant ones last."""
    order = {metric: n for n, metric in enumerate(FIRST)}

    def rank(name: str) -> tuple[int, bool]:
        series = follower.series[name]
        return order.get(series.metric, len(order)), len({value for _, value in series.values}) < 2

    return sorted(follower.series, key=rank)[:MOST_ROWS]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"healthcheck top: --every takes seconds from 0.1 to 3600, not {text!r}")
    return seconds
