"""``healthcheck prune``: delete old records. Runs that go on, and folders that are no records, are left alone."""

from __future__ import annotations

import argparse
import contextlib

from healthcheck.cli.choosing import age, parse_since
from healthcheck.cli.options import add_records_folder, records_folder
from healthcheck.core.errors import UsageError
from healthcheck.core.text import plural, shorten, size_text
from healthcheck.record.folder import delete, is_over
from healthcheck.record.runs import Run, all_runs

NAME = "prune"
HELP = "delete old records, the oldest first; never those of runs in progress"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_records_folder(parser)
    add("--keep", type=int, metavar="N", help="leave the newest N")
    add("--older", metavar="AGE", help="delete only what began longer ago than this: 30d, 12h, 2w")
    add("--healthy", action="store_true", help="delete only runs whose verdict is ok")
    add("--list", action="store_true", help="say what would be deleted, delete nothing")


def main(args: argparse.Namespace) -> int:
    if args.keep is None and args.older is None:
        raise UsageError(
            "healthcheck prune: say what to delete: --keep 50, --older 30d, or both (--list only lists it)"
        )
    if args.keep is not None and args.keep < 0:
        raise UsageError("healthcheck prune: --keep takes a number of runs from 0")
    folder = records_folder(args)
    if not folder.is_dir():
        raise UsageError(f"healthcheck prune: there is no folder {folder}")
    runs = all_runs(folder)
    youngest = parse_since(args.older, "--older") if args.older else 0.0
    old = runs[: max(0, len(runs) - (args.keep or 0))]
    # A run that is killed leaves no report, like one that goes on: is_over() counts a day of silence as its end.
    going = [run for run in old if run.status == "running" or not is_over(run.folder)]
    chosen = [
        run for run in old if run not in going and age(run) >= youngest and (not args.healthy or run.status == "ok")
    ]
    amount = sum(_bytes(run) for run in chosen)
    if args.list:
        for run in chosen:
            print(f"{run.name}  {run.status}")
        print(f"would delete {plural(len(chosen), 'run')}, {size_text(amount)}, of {len(runs):,} in {folder}")
        return 0
    stuck = [run.name for run in chosen if not delete(run.folder)]
    print(
        f"deleted {plural(len(chosen) - len(stuck), 'run')}, {size_text(amount)}; {len(all_runs(folder)):,} left in {folder}"
    )
    if going:
        print(f"  kept, because they may still be running: {shorten([run.name for run in going])}")
    if stuck:
        raise UsageError(f"healthcheck prune: could not be deleted, check permissions: {shorten(stuck)}")
    return 0


def _bytes(run: Run) -> int:
    """Size of a record. A file that vanishes meanwhile, or may not be looked at, counts nothing."""
    total = 0
    for path in run.folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 0 if path.is_symlink() else path.stat().st_size
    return total
