"""``healthcheck replay``: recorded runs through the rules, as if they ran now."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from healthcheck.commands.options import add_plugin_option, add_rule_options, rule_choice
from healthcheck.commands.replaying import Given, Outcome, judge_of
from healthcheck.errors import UsageError
from healthcheck.outcome import ALERTS, INTERNAL, NOTHING_JUDGED, OK, USAGE
from healthcheck.reports.files import kinds_of, parse_reports, write_reports

NAME = "replay"
HELP = "judge recorded runs by rules: when would each rule have fired?"

_WORST_FIRST = (INTERNAL, ALERTS, NOTHING_JUDGED, OK)
MANY = 5
"""From this many runs on there is a table instead of timelines."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "healthcheck replay RUN... [options]"
    parser.epilog = (
        "RUN is a file, a folder or a glob: our record, trainer_state.json, CSV, JSON lines, TensorBoard, text logs."
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="recorded runs: files, folders, globs")
    add("--since", metavar="AGE", help="our own records that began within this time (14d, 36h), instead of RUN")
    add_rule_options(parser)
    add("--against", metavar="OLD", help="show only what changes from these rules: a file, a pack, or GIT_REV:path")
    add("--sweep", metavar="RULE.KEY=A,B,C", help="how often a rule would fire for each of these values")
    add("--bad", action="append", default=[], metavar="RUN", help="with --sweep: a run that went wrong; repeatable")
    add("--map", action="append", default=[], metavar="COLUMN=METRIC", help="read a column as this metric; repeatable")
    add("--pattern", action="append", default=[], metavar="RE", help="read text logs with named groups (?P<loss>...)")
    add("--show-columns", action="store_true", help="print which column is read as which metric, judge nothing")
    add("--format", choices=("text", "json"), default="text", help="json: a list of reports, one per run")
    add("--fail-on", choices=("info", "warning", "error", "never"), help="exit 1 from this severity (default error)")
    add(
        "--report",
        action="append",
        default=[],
        metavar="KIND=PATH",
        help="write json=, junit=, sarif=, html= or github; repeatable",
    )
    add("--timeline", action="store_true", help="timelines also for many runs")
    add("--jobs", metavar="N", default="1", help="judge in N processes (0: one per core)")
    add_plugin_option(parser)
    add("-q", dest="quiet", action="store_true", help="verdicts only")


def main(args: argparse.Namespace) -> int:
    given = _given(args)
    kinds = kinds_of(given.host.registry.reports)
    wanted = parse_reports(args.report, kinds)
    if not args.show_columns:
        for note in given.check():
            print(f"healthcheck: {note}", file=sys.stderr)
    paths, problems = _find(args, given)
    if args.show_columns:
        return _show_columns(paths, problems, given)
    if args.sweep:
        from healthcheck.commands.replay_sweep import sweep

        return sweep(args, given, paths, problems)
    if args.against:
        from healthcheck.commands.replay_against import against

        return against(args, given, paths, problems)
    outcomes = list(_progress(_judged(paths, given, _jobs(args.jobs)), len(paths)))
    outcomes = [*outcomes, *problems]
    code = exit_code_of(outcomes)
    for problem in write_reports(wanted, [o.to_json() for o in outcomes if o.report], kinds=kinds):
        print(f"healthcheck: {problem}", file=sys.stderr)
    if args.format == "json":
        print(json.dumps([o.to_json() for o in outcomes], indent=1, allow_nan=False))
        say_problems(outcomes)
        return code
    _print_text(args, outcomes, code)
    return code


def exit_code_of(outcomes: Sequence[Outcome]) -> int:
    """Worst over the runs; 4 if a run that was named cannot be read, 5 if one in a folder cannot."""
    if any(o.problem and o.named for o in outcomes):
        return USAGE
    codes = {NOTHING_JUDGED if o.problem else int(o.report["exit_code"]) for o in outcomes if o.report or o.problem}
    return next((code for code in _WORST_FIRST if code in codes), NOTHING_JUDGED)


# --------------------------------------------------------------------------- what to judge


def _given(args: argparse.Namespace) -> Given:
    mapping = {}
    for item in args.map:
        column, equals, metric = item.rpartition("=")
        if not equals or not column or not metric:
            raise UsageError(f"healthcheck replay: --map takes COLUMN=METRIC, for instance my_obj=loss, not {item!r}")
        mapping[column] = metric
    return Given(
        choice=rule_choice(args),
        fail_on=args.fail_on,
        plugins=args.plugins,
        mapping=mapping,
        pattern=args.pattern,
    )


def _find(args: argparse.Namespace, given: Given) -> tuple[list[str], list[Outcome]]:
    """Paths of all runs, and those that nobody can read."""
    named = [*args.runs, *args.bad, *(_records_since(args) if args.since else ())]
    if not named:
        raise UsageError("healthcheck replay: no run given; for instance: healthcheck replay runs/ or replay latest")
    named = [_latest(name) for name in named]
    missing = [name for name in named if not os.path.exists(os.path.expanduser(name)) and not _is_glob(name)]
    if missing:
        raise UsageError("\n".join(f"healthcheck replay: there is no {name}" for name in missing))
    if args.pattern:
        return [path for name in named for path in _files(name)], []
    found = given.find(named)
    given_paths = {str(Path(os.path.expanduser(name))) for name in named}
    # A run that is named twice, once by --bad, is judged once, however its path is written.
    once: dict[str, str] = {}
    for f in found:
        if f.reader is not None:
            once.setdefault(os.path.realpath(f.path), str(f.path))
    runs = list(once.values())
    problems = [
        Outcome(str(f.path), problem=f.problem, named=str(f.path) in given_paths) for f in found if f.reader is None
    ]
    for problem in problems:
        if Path(problem.path).is_dir():
            problem.named = True
    return runs, problems


def _records_since(args: argparse.Namespace) -> list[str]:
    """The records of this project that are young enough; of a folder, if one is named instead of runs."""
    from healthcheck.commands.runs import age, parse_since
    from healthcheck.record.runs import all_runs, reading_folder

    if args.runs:
        raise UsageError("healthcheck replay: --since stands instead of RUN: it takes the records of this project")
    oldest = parse_since(args.since)
    found = [str(run.folder) for run in all_runs() if age(run) <= oldest]
    if not found:
        raise UsageError(f"healthcheck replay: no runs in {reading_folder()} within {args.since}")
    return found


def _latest(name: str) -> str:
    """``latest`` and names of recorded runs work as everywhere."""
    if os.path.exists(os.path.expanduser(name)) or os.sep in name or _is_glob(name):
        return name
    from healthcheck.record.runs import find_run

    try:
        return str(find_run(name).folder)
    except UsageError:
        return name


def _files(name: str) -> Iterator[str]:
    import glob

    for path in sorted(glob.glob(os.path.expanduser(name), recursive=True)) or [name]:
        if os.path.isdir(path):
            yield from (str(p) for p in sorted(Path(path).iterdir()) if p.is_file())
        else:
            yield path


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _jobs(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"healthcheck replay: --jobs takes a number of processes, not {text!r}")
    return int(text) or os.cpu_count() or 1


def _judged(paths: Sequence[str], given: Given, jobs: int) -> Iterator[Outcome]:
    from healthcheck.replay.pool import judge_all

    return judge_all(paths, functools.partial(judge_of, given), jobs=jobs)


def _progress(outcomes: Iterable[Any], total: int) -> Iterator[Any]:
    """A bar on stderr, for many runs on a terminal only."""
    if total < MANY or not sys.stderr.isatty():
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(outcomes, description="replaying", total=total, console=console, transient=True)


# --------------------------------------------------------------------------- what to say


def _show_columns(paths: Sequence[str], problems: Sequence[Outcome], given: Given) -> int:
    failed = bool(problems)
    for path in paths:
        try:
            text = given.read(path).show_columns()
        except (OSError, UsageError, ValueError) as error:
            problems = [*problems, Outcome(path, problem=str(error))]
            failed = True
            continue
        print(
            path if len(paths) > 1 else "",
            *(f"  {line}" for line in text.splitlines()),
            sep="\n" if len(paths) > 1 else "",
        )
    say_problems(problems)
    return USAGE if failed else OK


def say_problems(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.problem:
            shown = outcome.problem if outcome.path in outcome.problem else f"{outcome.path}: {outcome.problem}"
            print(f"healthcheck replay: {shown}", file=sys.stderr)


def _print_text(args: argparse.Namespace, outcomes: Sequence[Outcome], code: int) -> None:
    from healthcheck.replay.table import table
    from healthcheck.replay.timeline import ending, timeline
    from healthcheck.reports.text import plural, with_exit

    reports = [o.report for o in outcomes if o.report]
    if len(reports) < MANY or args.timeline:
        for report in reports:
            print("\n".join(timeline(report, quiet=args.quiet)))
            if len(reports) > 1:
                print(f"  {ending(report)}\n")
    if len(reports) > 1 and not args.quiet:
        print("\n".join(table(reports, whole=args.timeline)))
    say_problems(outcomes)
    if len(reports) == 1 and len(outcomes) == 1:
        print(with_exit(f"healthcheck: {ending(reports[0])}", code))
        return
    counts = {name: sum(r["verdict"] == name for r in reports) for name in ("failed", "warned", "ok", "not judged")}
    parts = [f"{name} {n}" for name, n in counts.items() if n]
    unread = sum(bool(o.problem) for o in outcomes)
    if unread:
        parts.append(f"unreadable {unread}")
    rows = sum(r["record"]["rows"] for r in reports)
    print(with_exit(f"healthcheck: {plural(len(reports), 'run')}, {plural(rows, 'row')}: {', '.join(parts)}", code))
