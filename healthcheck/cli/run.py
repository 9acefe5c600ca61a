"""``healthcheck run train.py``: any training script, unmodified, under rules."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

from healthcheck.cli.launch import command_of, launch, options_of
from healthcheck.cli.options import (
    add_fail_on,
    add_plugin_option,
    add_report_option,
    add_rule_options,
    given_reports,
    given_settings,
    rule_choice,
)
from healthcheck.cli.usage import command_parser, nearest_file
from healthcheck.core.errors import UsageError

NAME = "run"
HELP = "run a training script or any command that starts some, unmodified, under rules"

ARGPARSE_ERROR = 2
"""What a script exits with that was given an option it does not know."""
_OURS_FIRST = "its own options come before it: healthcheck run [options] SCRIPT [its arguments]"
_USAGE = "healthcheck run [options] (SCRIPT | -m MODULE | COMMAND) [its own arguments]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    add = parser.add_argument
    add_rule_options(parser)
    add("--observe", action="store_true", help="judge and report, never act; the exit code stays the script's")
    add_fail_on(parser)
    add(
        "--live",
        action="store_true",
        help="a live view below the script's output, redrawn once a second; on a terminal only",
    )
    add("--max-steps", metavar="N", help="end the run after N steps; exit 0 if it is healthy")
    add("--max-time", metavar="TIME", help="end the run after so much training, for instance 90s or 5m")
    add_report_option(
        parser, "a report besides the record: json=hc.json, junit=hc.xml, sarif=hc.sarif, html=hc.html, github"
    )
    add(
        "--against",
        metavar="RUN",
        help="compare with an earlier run: which of its alerts are gone, still there, or new",
    )
    add(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT@STEP",
        help="break the run on purpose, to rehearse your alarms: nan-grad@120",
    )
    add_plugin_option(parser)
    add("--strict-plugins", action="store_true", help="a plugin that cannot be loaded is an error")
    add("-q", dest="quiet", action="count", default=0, help="errors and the closing line only; -qq: exit code only")
    add("-v", dest="verbose", action="count", default=0, help="report every change of a rule's state")
    add("--dry-run", action="store_true", help=argparse.SUPPRESS)
    add("-m", dest="module", action="store_true", help="the target is a module, as in python -m")
    add("target", nargs="?", help=argparse.SUPPRESS)
    add("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    if args.dry_run:
        raise UsageError(
            "healthcheck run: there is no --dry-run; did you mean --observe (watch, never act) "
            "or `healthcheck plan` (show what would be judged, run nothing)?"
        )
    from healthcheck.run.opening import SessionOptions, switched_off

    command = None if args.module or args.target is None else command_of(args.target, args.rest)
    if command is not None:
        _need_plugin_files(args.plugins)
        return _replaced_by(command) if switched_off() else launch(args, command)
    target, argv = _target(args)
    _need_plugin_files(args.plugins)
    if switched_off():  # before anything of ours that a script could notice is imported
        return _as_plain_python(target, argv, args.module)
    with _before_the_script():
        from healthcheck.assembly import open_session
        from healthcheck.faults.spec import parse_faults
        from healthcheck.instrument.hangs import record_flights
        from healthcheck.instrument.script import ScriptTrainer
        from healthcheck.record.job import Job
        from healthcheck.record.restarts import KeptStates

        faults = parse_faults(args.inject, option="healthcheck run: --inject")
        against = _earlier(args.against)  # before this run is the latest one

        around = Job.of_environment()  # this command may be a part of one that is watched as a whole
        record, first = (True, True) if around is None else around.place()
        session = open_session(
            SessionOptions(
                name=f"-m {target}" if args.module else target,
                **rule_choice(args),
                settings=given_settings(args),
                plugins=args.plugins,
                strict_plugins=args.strict_plugins,
                reports=given_reports(args.report),
                argv=[target, *argv],
                record=record,
                callbacks=[against] if against is not None else [],
            )
        )
    if session.info.world_size > 1:
        record_flights()
    clash = name_clash(target, args.module)
    if clash:
        session.note(clash)
    run_dir = session.info.run_dir
    store = KeptStates(session, run_dir) if run_dir is not None else None
    job = Job.begin(options_of(args))
    job.opened(run_dir, True)
    if around is not None:
        around.opened(run_dir, first)
    trainer = ScriptTrainer(session, store=store, job=job)
    try:
        # restore=False: the process ends with the script, whose exit functions still see the program that they belong to.
        with _rehearsal(session, faults):
            code = trainer.run(target, argv, args.module, restore=False)
    finally:
        job.clear()
        if around is not None:
            around.ended(session.info.target, session.report or {})
    behind = _behind_the_script(argv) if code == ARGPARSE_ERROR else ""
    if behind:
        print(f"healthcheck: {behind} came after the script, so the script received it; {_OURS_FIRST}", file=sys.stderr)
    return code


@contextmanager
def _before_the_script() -> Iterator[None]:
    """For what is loaded and compiled before a script's first line, and lives as long as its process.

    Nothing is searched for garbage inside: there is none, and looking for it took a quarter of the start-up. Afterwards
    the collector leaves what exists alone, so that it does not cost the script time either.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if on:
            gc.enable()


def _rehearsal(session: Any, faults: Any) -> AbstractContextManager[Any]:
    if not faults:
        return nullcontext()
    from healthcheck.faults.machine import rehearsal

    return rehearsal(session, faults)


def _earlier(named: str | None) -> Any:
    """What compares this run with an earlier one; None where nobody asks. Raises ``UsageError`` for one without a report."""
    if named is None:
        return None
    from healthcheck.record.runs import find_run
    from healthcheck.reports.against import Against

    run = find_run(named)
    if run.report is None:
        raise UsageError(f"healthcheck run: --against {named}: {run.name} has no report; it did not end properly")
    return Against(run.name, run.report)


def _behind_the_script(argv: Sequence[str]) -> str:
    """An option of ours among the script's arguments, which a script that knows none such refuses with exit 2."""
    ours = {
        name for action in command_parser(NAME)._actions for name in action.option_strings if name.startswith("--")
    } - {"--help"}
    return next((word for word in argv if word.partition("=")[0] in ours), "")


def _target(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The script and its arguments. Raises ``UsageError`` with the right line for what was typed instead."""
    if args.target is None:
        raise UsageError(f"healthcheck run: nothing to run; usage: {_USAGE}")
    target, rest = str(args.target), list(args.rest)
    if args.module:
        _need_module(target)
        return target, rest
    path = Path(target)
    if not path.exists():
        raise UsageError(_no_such_file(target, rest))
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"healthcheck run: {target} is a folder without __main__.py; name a script in it")
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(
            f"healthcheck run: {target} is not a script; did you mean: healthcheck run --rules {target} "
            f"{shlex.join(rest) or 'SCRIPT'}"
        )
    if path.is_file() and not os.access(path, os.R_OK):
        raise UsageError(f"healthcheck run: {target} cannot be read; check its permissions")
    return target, rest


def _need_plugin_files(plugins: Sequence[str]) -> None:
    """A plugin that is broken costs a line, not the run; a file that is not there is a slip of the pen."""
    for name in plugins:
        path = Path(name)
        if path.exists() or not (path.suffix == ".py" or "/" in name or os.sep in name):
            continue
        hint = nearest_file(name, path.parent, "*.py") or f"working directory: {os.getcwd()}"
        raise UsageError(f"healthcheck run: -p {name}: there is no such file ({hint})")


def _need_module(name: str) -> None:
    """Say that a module does not exist before anything is opened. Imports nothing: its packages are the script's to import.

    Raises ``UsageError``.
    """
    if Path(name).is_file():
        raise UsageError(f"healthcheck run: {name} is a file, not a module; leave -m out: healthcheck run {name}")
    top = name.partition(".")[0]
    known = top in sys.builtin_module_names or BuiltinImporter.find_spec(top) or FrozenImporter.find_spec(top)
    path = sys.path if getattr(sys.flags, "safe_path", False) else [os.getcwd(), *sys.path[1:]]
    if not top or not (known or PathFinder.find_spec(top, path)):
        raise UsageError(f"healthcheck run: there is no module {top or name} in {os.getcwd()} or installed")


def _no_such_file(target: str, rest: Sequence[str]) -> str:
    hint = nearest_file(target, Path(target).parent, "*.py")
    if not hint and "." in target and "/" not in target and not target.endswith(".py"):
        hint = f"for a module: healthcheck run -m {shlex.join([target, *rest])}"
    if not hint and target.startswith("-"):
        hint = f"options of healthcheck come before the script; see {'healthcheck run --help'}"
    return f"healthcheck run: there is no script {target}{'; ' + hint if hint else ' (working directory: ' + os.getcwd() + ')'}"


def name_clash(target: str, as_module: bool) -> str:
    """One line if the script has its own ``healthcheck`` module, which it would not get here; else empty."""
    from healthcheck.instrument.script import Target

    folder = Path(Target(target, [], as_module).folder())
    ours = Path(__file__).resolve().parents[1]
    for theirs in (folder / "healthcheck.py", folder / "healthcheck" / "__init__.py"):
        if theirs.is_file() and theirs.resolve().parent != ours:
            return (
                f"{theirs} has our name: in this run `import healthcheck` gives the script torch-healthcheck, "
                "not its own module. Rename it if the script imports it"
            )
    return ""


def _as_plain_python(target: str, argv: list[str], as_module: bool) -> int:
    """``HEALTHCHECK=off``: become ``python X``."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return _replaced_by([sys.executable, *flags, *(["-m"] if as_module else []), target, *argv])


def _replaced_by(command: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if os.name == "nt":  # exec would return to the shell before the script has ended
        return subprocess.call(command)
    os.execv(command[0], command)
