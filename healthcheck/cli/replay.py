"""``healthcheck replay``: recorded runs through the rules, as if they ran now.

``--against OLD`` shows what another version of the rules would change, ``--sweep RULE.KEY=A,B`` how often a rule would
fire at several values. What is read and judged is in :mod:`healthcheck.replay`; here are the command line, the search
for runs and what is printed.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from healthcheck.cli.choosing import age, parse_since
from healthcheck.cli.options import (
    add_fail_on,
    add_format,
    add_plugin_option,
    add_report_option,
    add_rule_options,
    print_json,
    rule_choice,
)
from healthcheck.cli.outlet import raw
from healthcheck.core.errors import HealthCheckError, RuleFileError, UsageError
from healthcheck.core.text import number, plural, suggest, width_of
from healthcheck.readers.find import RunFile, find_runs, read_run
from healthcheck.readers.textlog import PatternReader
from healthcheck.record.runs import all_runs, find_run, reading_folder
from healthcheck.replay.play import RuleCopies, judge_all, only_rules, play, record_facts, replay_report
from healthcheck.replay.tuning import (
    Change,
    CriticalValue,
    Swept,
    change_lines,
    changes,
    first_fired,
    keep_line,
    sweep_json,
    sweep_lines,
    value_now,
)
from healthcheck.replay.views import ending, table, timeline
from healthcheck.reports.files import kinds_of, parse_reports, write_reports
from healthcheck.reports.wording import with_exit
from healthcheck.rulelang.sources import is_pack_name
from healthcheck.run.ending import ALERTS, INTERNAL, NOTHING_JUDGED, OK, USAGE, VERDICTS

if TYPE_CHECKING:
    from healthcheck.assembly import RuleChoice
    from healthcheck.extend.host import PluginHost
    from healthcheck.readers.series import RecordedRun
    from healthcheck.rulelang.rule import Cause, RuleSet

R = TypeVar("R")

NAME = "replay"
HELP = "judge recorded runs by rules: when would each rule have fired?"

_WORST_FIRST = (INTERNAL, ALERTS, NOTHING_JUDGED, OK)
"""Of several runs the exit code is the first of these that one of them has."""
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
    add_format(parser, help="json: a list of reports, one per run")
    add_fail_on(parser)
    add_report_option(parser, "write json=, junit=, sarif=, html= or github")
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
        return sweep(args, given, paths, problems)
    if args.against:
        return against(args, given, paths, problems)
    outcomes = [*_judge_all(paths, functools.partial(judge_of, given), args.jobs), *problems]
    code = exit_code_of(outcomes)
    for problem in write_reports(wanted, [o.to_json() for o in outcomes if o.report], kinds=kinds):
        print(f"healthcheck: {problem}", file=sys.stderr)
    if args.format == "json":
        print_json([o.to_json() for o in outcomes])
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
        if Path(problem.path).is_dir():  # a folder without any run in it: somebody named it, and gets an answer
            problem.named = True
    return runs, problems


def _records_since(args: argparse.Namespace) -> list[str]:
    """The records of this project that are young enough; of a folder, if one is named instead of runs."""
    if args.runs:
        raise UsageError("healthcheck replay: --since stands instead of RUN: it takes the records of this project")
    oldest = parse_since(args.since)
    found = [str(run.folder) for run in all_runs() if age(run) <= oldest]
    if not found:
        raise UsageError(f"healthcheck replay: no runs in {reading_folder()} within {args.since}")
    return found


def _latest(name: str) -> str:
    """The folder of a recorded run by its name or ``latest``, as every command takes them; other words as they are."""
    if os.path.exists(os.path.expanduser(name)) or os.sep in name or _is_glob(name):
        return name
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


# --------------------------------------------------------------------------- judging


@dataclass(slots=True)
class Outcome:
    """How one path ended: a report, or the problem that kept it from being read."""

    path: str
    report: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    named: bool = False
    """The user named this very file."""
    extra: Any = None
    """With ``--against``: the report by the old rules."""

    def to_json(self) -> dict[str, Any]:
        return self.report or {"path": self.path, "problem": self.problem}


@dataclass
class Given:
    """What the command line says, in plain values: with ``--jobs`` each process gets a copy and compiles for itself."""

    choice: RuleChoice = field(default_factory=dict)  # type: ignore[assignment]
    fail_on: str | None = None
    plugins: Sequence[str] = ()
    mapping: dict[str, str] = field(default_factory=dict)
    pattern: Sequence[str] = ()
    readers: dict[str, str] = field(default_factory=dict)
    """Path -> name of its reader, once :meth:`find` has looked."""
    _host: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Plugins hold modules and functions, which do not pickle; the other process loads them by name.
        return {**self.__dict__, "_host": None}

    @property
    def host(self) -> PluginHost:
        if self._host is None:
            from healthcheck.assembly import plugin_host

            self._host = plugin_host(self.plugins)
        host: PluginHost = self._host
        return host

    def load(self, *, more: Sequence[str] = (), notes: list[str] | None = None) -> RuleSet:
        """Compile the rules.

        :param more: as ``--set``, after those of the command line.
        :param notes: sentences worth saying once are appended here.
        """
        from healthcheck.assembly import load_rules_for

        chosen: RuleChoice = {**self.choice, "set": [*self.choice.get("set", ()), *more]}
        settings = {"fail_on": self.fail_on} if self.fail_on else {}
        loaded = load_rules_for(host=self.host, settings=settings, notes=notes, **chosen)
        # A session calls this hook when it opens; a replay has no session, and must judge the same rules.
        self.host.modify_rules(loaded.rules)
        return loaded

    def check(self) -> list[str]:
        """Raise ``UsageError`` for bad rules or patterns before anything is read; returns notes worth saying."""
        notes: list[str] = []
        self.load(notes=notes)
        notes += [str(failure) for failure in self.host.failures]
        if self.pattern:
            PatternReader(list(self.pattern))
        return notes

    def find(self, paths: Sequence[str]) -> list[RunFile]:
        found = find_runs(paths, self.host.registry.readers)
        self.readers |= {str(run.path): run.reader.name for run in found if run.reader is not None}
        return found

    def read(self, path: str) -> RecordedRun:
        registry = self.host.registry
        reader = registry.readers.get(self.readers.get(path, ""))
        found = RunFile(Path(path), reader) if reader is not None else path
        return read_run(found, mapping=self.mapping, pattern=list(self.pattern) or None, registry=registry)


def judge_of(given: Given, old: Given | None = None) -> Callable[[str], Outcome]:
    """Compile once; the judge then takes one path after the other.

    :param old: other rules for the same runs; their report is the outcome's ``extra``.
    """

    versions = [RuleCopies(each.load()) for each in (given, old) if each is not None]

    def judge(path: str) -> Outcome:
        try:
            run = given.read(path)
        except (HealthCheckError, OSError) as error:
            return Outcome(path, problem=str(error))
        facts = record_facts(run, given.host.registry)
        plays, seen = play(run, [copies.fresh() for copies in versions], facts=facts)
        if seen.problem and not seen.batches:
            return Outcome(path, problem=seen.problem)
        run.notes.extend(facts.notes)
        registry = given.host.registry
        reports = [replay_report(p, run, seen, registry, path=path) for p in plays]
        return Outcome(path, reports[0], extra=None if old is None else reports[1])

    return judge


def _jobs(text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"healthcheck replay: --jobs takes a number of processes, not {text!r}")
    return int(text) or os.cpu_count() or 1


def _judge_all(paths: Sequence[str], prepare: Callable[[], Callable[[str], R]], jobs: str) -> Iterator[R]:
    """One result per path, in the order given; with a bar on stderr, for many runs on a terminal only."""
    outcomes = judge_all(paths, prepare, jobs=_jobs(jobs))
    if len(paths) < MANY or not sys.stderr.isatty():
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(file=raw(sys.stderr))
    yield from track(outcomes, description="replaying", total=len(paths), console=console, transient=True)


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
        print("\n".join(with_exit(f"healthcheck: {ending(reports[0])}", code, width_of(sys.stdout))))
        return
    counts = {name: sum(r["verdict"] == name for r in reports) for name in reversed(VERDICTS)}
    parts = [f"{name} {n}" for name, n in counts.items() if n]
    unread = sum(bool(o.problem) for o in outcomes)
    if unread:
        parts.append(f"unreadable {unread}")
    rows = sum(r["record"]["rows"] for r in reports)
    text = f"healthcheck: {plural(len(reports), 'run')}, {plural(rows, 'row')}: {', '.join(parts)}"
    print("\n".join(with_exit(text, code, width_of(sys.stdout))))


# --------------------------------------------------------------------------- --against: other rules


def against(args: argparse.Namespace, given: Given, paths: Sequence[str], problems: Sequence[Outcome]) -> int:
    """Print only what changes. The exit code is that of the new rules."""

    with tempfile.TemporaryDirectory() as folder:
        rules = [old_rules(args.against, Path(folder))]
        old = replace(given, choice={"rules": rules, "profile": given.choice.get("profile")})
        old.check()
        outcomes = list(_judge_all(paths, functools.partial(judge_of, given, old=old), args.jobs))
    found: list[Change] = []
    for outcome in outcomes:
        if outcome.report:
            found += [
                change
                for change in changes(outcome.path, outcome.report, outcome.extra)
                if not given.choice.get("only") or change.rule in outcome.report["rules"]  # --only narrows the question
            ]
    outcomes = [*outcomes, *problems]
    if args.format == "json":
        print_json([change.to_json() for change in found])
    else:
        print("\n".join(change_lines(found, sum(bool(o.report) for o in outcomes))))
    say_problems(outcomes)
    return exit_code_of(outcomes)


def old_rules(text: str, folder: Path) -> str:
    """A file or pack as it is; ``GIT_REV:path`` is taken out of git, with the rule files beside it.

    :param folder: where files from git are written.

    Raises ``UsageError`` for a revision or a path that git does not know.
    """
    if Path(text).exists() or ":" not in text:
        return text
    revision, _, path = text.partition(":")
    if not _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"):
        if is_pack_name(text):
            return text
        raise UsageError(
            f"healthcheck replay: --against: {revision} is not a git revision here, and {text} is not a file or pack"
        )
    inside = _path_in_tree(revision, path)
    parent = str(PurePosixPath(inside).parent)
    # The whole folder: the file may extend its neighbours, and they must be of the same revision.
    packed = _git("archive", "--format=tar", revision, *([] if parent == "." else [parent]))
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            if member.isfile() and member.name.endswith((".yaml", ".yml")):
                target = folder / member.name
                content = archive.extractfile(member)
                if content is not None and target.resolve().is_relative_to(folder.resolve()):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content.read())
    return str(folder / inside)


def _path_in_tree(revision: str, path: str) -> str:
    """Git counts from the top of the repository; people also from where they stand."""
    prefix = _git("rev-parse", "--show-prefix").decode().strip()
    top = PurePosixPath(path.removeprefix("./"))
    here = PurePosixPath(prefix) / top
    for candidate in dict.fromkeys([str(here), str(top)] if path.startswith("./") else [str(top), str(here)]):
        if _git("cat-file", "-t", f"{revision}:{candidate}").strip() == b"blob":
            return candidate
    raise UsageError(f"healthcheck replay: --against: there is no {path} in {revision}")


def _git(*words: str) -> bytes:
    """Standard output of git, from the top of the repository where it matters; empty if it fails."""
    where = ["git"]
    if words[0] == "archive":  # it takes paths from where it is called, and only below it
        top = _git("rev-parse", "--show-toplevel").decode().strip()
        where += ["-C", top]
    try:
        done = subprocess.run([*where, *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("healthcheck replay: --against REV:path needs git") from None
    return done.stdout if done.returncode == 0 else b""


# --------------------------------------------------------------------------- --sweep: one key at several values


def sweep(args: argparse.Namespace, given: Given, paths: Sequence[str], problems: Sequence[Outcome]) -> int:
    """Print the table; exit 0, or 4 if a named run cannot be read or the sweep makes no sense."""

    rule_id, key, values = _parse_sweep(args.sweep)
    base = given.load()
    rule, inner = _swept(base, rule_id, key)
    for value in values:  # every mistake in a value before the first run is read
        try:
            given.load(more=[f"{rule_id}.{key}={value}"])
        except RuleFileError as error:
            option = f"--sweep {rule_id}.{key}={value}"
            raise UsageError("\n".join(str(replace(p, path=option)) for p in error.problems)) from error
    bad = _bad(args.bad, given)
    settings = [f"{rule_id}.{key}={value}" for value in values]
    prepare = functools.partial(_judge, given, rule.id, inner, settings, frozenset(bad))
    results = list(_judge_all(paths, prepare, args.jobs))
    unread = [*problems, *(Outcome(s.path, problem=s.problem) for s in results if s.problem)]
    unreadable = {str(Path(o.path)): o.problem for o in unread}
    if args.format == "json":
        print_json(sweep_json(rule_id, key, values, results, unreadable))
    else:
        rows = sum(s.rows for s in results)
        note = f" ({len(unread)} unreadable: named on stderr)" if unread else ""
        print(f"{plural(len(results), 'run')}, {number(rows)} rows{note}")
        keep = [keep_line(rule, inner, value) for value in values]
        print("\n".join(sweep_lines(rule, inner, values, results, now=value_now(rule, inner, values), keep=keep)))
    say_problems(unread)
    return USAGE if any(p.named for p in problems) else OK


def _parse_sweep(text: str) -> tuple[str, str, list[str]]:
    """``RULE.key.path=6,8,10`` in its parts."""
    path, equals, listed = text.partition("=")
    rule_id, dot, key = path.strip().partition(".")
    values = [v.strip() for v in listed.split(",") if v.strip()]
    if not equals or not dot or not key or not values:
        raise UsageError(
            "healthcheck replay: --sweep takes RULE.KEY=VALUES, for instance "
            f"loss-spike.when.robust_z.above=6,8,10, not {text!r}"
        )
    return rule_id, key, values


def _swept(rules: RuleSet, rule_id: str, key: str) -> tuple[Cause, str]:
    """The cause whose key is swept, and the key within it: of ``causes.loss.when.above``, or ``loss.when.above``."""
    rule = next((rule for rule in rules.rules if rule.id == rule_id), None)
    if rule is None:
        hint = suggest(rule_id, [r.id for r in rules.rules]) or "`healthcheck explain` lists them"
        why = "it is switched off" if rule_id in rules.off else hint
        raise UsageError(f'healthcheck replay: --sweep: "{rule_id}" is not a rule here; {why}')
    if not rule.causes[0].name:
        return rule.causes[0], key
    name, _, inner = key.removeprefix("causes.").partition(".")
    for cause in rule.causes:
        if cause.name == name and inner:
            return cause, inner
    names = ", ".join(cause.name for cause in rule.causes)
    raise UsageError(f"healthcheck replay: --sweep takes {rule_id}.CAUSE.KEY=VALUES here; the causes are {names}")


def _bad(named: Sequence[str], given: Given) -> list[str]:
    """Paths of all runs under the names given with ``--bad``."""
    return [os.path.realpath(found.path) for found in given.find([_latest(name) for name in named])] if named else []


def _judge(
    given: Given, cause_id: str, key: str, settings: Sequence[str], bad: frozenset[str]
) -> Callable[[str], Swept]:
    """Judges a run by one cause, once for each of these settings (``RULE.KEY=VALUE``)."""
    copies = [RuleCopies(only_rules(given.load(more=[setting]), {cause_id})) for setting in settings]
    plain = key.startswith("when.")

    def judge(path: str) -> Swept:
        swept = Swept(path, os.path.realpath(path) in bad, fired=[None] * len(settings))
        try:
            run = given.read(path)
        except (HealthCheckError, OSError) as error:
            swept.problem = str(error)
            return swept
        facts = record_facts(run, given.host.registry)
        followed: list[CriticalValue] = []

        def follow(plays: Sequence[Any]) -> Callable[[], None] | None:
            if not plain:
                return None
            followed.append(CriticalValue(plays[0], plays[0].rules.cause(cause_id)))
            return followed[0].look

        plays, seen = play(run, [c.fresh() for c in copies], facts=facts, follow=follow)
        swept.rows = seen.batches
        if seen.problem and not seen.batches:
            swept.problem = seen.problem
        swept.fired = [first_fired(p, cause_id) for p in plays]
        swept.judged = any(
            s is not None and s.state.value not in ("no_data", "warming")
            for s in plays[0].engine.by_id[cause_id].series.values()
        )
        if followed:
            swept.critical, swept.critical_step = followed[0].value, followed[0].step
        return swept

    return judge
