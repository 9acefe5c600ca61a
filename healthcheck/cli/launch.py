"""``healthcheck run torchrun ...``: any command, as it is typed; every Python process of it that trains is watched."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.cli.options import given_reports, given_settings, rule_choice
from healthcheck.core.errors import UsageError
from healthcheck.core.text import plural, visible

if TYPE_CHECKING:
    from healthcheck.record.job import Job

OPTIONS = (
    *("rules", "profile", "off", "only", "set", "mute", "force", "observe", "fail_on", "max_steps", "max_time"),
    *("report", "plugins", "strict_plugins", "quiet", "verbose"),
)
"""Options of ``healthcheck run`` that its processes are given."""
_SHELL_SCRIPTS = (".sh", ".bash")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was typed, for processes that may run in another folder: files by their whole paths."""
    from healthcheck.rulelang.discover import discover

    found = {name: getattr(args, name) for name in OPTIONS}
    if found["rules"] is not None:
        given = found["rules"] if isinstance(found["rules"], list) else [found["rules"]]
        found["rules"] = [_whole(word) for word in given]
    else:
        there = discover(None)
        if there.path is not None and there.path.suffix != ".toml":
            found["rules"] = [str(there.path.resolve())]
    found["plugins"] = [_whole(word) for word in args.plugins]
    found["report"] = ["=".join([kind, str(Path(path).absolute())]) if path else kind for kind, path in _reports(args)]
    return found


def _reports(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [(kind, path) for kind, _, path in (word.partition("=") for word in args.report)]


def _whole(word: str) -> str:
    return str(Path(word).resolve()) if Path(word).exists() else word


def command_of(target: str, rest: Sequence[str]) -> list[str] | None:
    """The command that was typed instead of a Python script; None if it is none.

    A file is a script of Python's unless its ending or its first line says that a shell or a program of its own reads it.
    """
    path = Path(target)
    if path.suffix in _SHELL_SCRIPTS and path.is_file():
        if os.access(path, os.X_OK) and _begins_with(path, b"#!"):
            return [str(path) if "/" in target else f"./{target}", *rest]
        return [shutil.which("bash") or "sh", target, *rest]
    if path.is_dir() or (path.is_file() and not _is_program(path)):
        return None
    found = target if path.is_file() and "/" in target else shutil.which(target)
    return None if found is None else [found, *rest]


def _is_program(path: Path) -> bool:
    """Whether a file is run by the system, and not by Python."""
    if path.suffix or not os.access(path, os.X_OK):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(200)
        first = head.split(b"\n", 1)[0]
        return not head.isascii() or (first.startswith(b"#!") and b"python" not in first)
    return False


def _begins_with(path: Path, mark: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(mark)) == mark
    return False


def launch(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Run a command; returns its exit code, or if that is 0 what the processes that were watched came to."""
    from healthcheck.assembly import load_rules_for, running_host
    from healthcheck.record.job import Job

    if args.inject:
        raise UsageError(f"healthcheck run: --inject takes a script, not {command[0]}: give it where the script is run")
    host = running_host(args.plugins, strict=args.strict_plugins)
    ruleset = load_rules_for(
        host=host, settings=given_settings(args), **rule_choice(args)
    )  # mistakes before anything runs
    given_reports(args.report)
    shown = visible(shlex.join([Path(command[0]).name, *command[1:]]))
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    if args.quiet == 0:
        _say(f"healthcheck: watching what `{shown}` starts, {plural(len(ruleset.rules), 'rule')} of {ruleset.source}")
    job = Job.begin(options_of(args))
    try:
        code = _run(command, job)
        return _closing(job, code, args, shown)
    finally:
        job.clear()


def _run(command: Sequence[str], job: Job) -> int:
    from healthcheck.record.job import Lookout

    try:
        process = subprocess.Popen(command, env={**os.environ, **job.variables(os.environ)})
    except OSError as error:
        raise UsageError(f"healthcheck run: {command[0]} cannot be started: {error.strerror}") from None
    lookout = Lookout(job, process.pid)
    lookout.start()
    with _handing_on_signals(process):
        code = process.wait()
    lookout.stop()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _handing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C reaches the command by itself; other requests to end are handed on, and its end is waited for."""

    def hand_on(number: int, frame: Any) -> None:
        with contextlib.suppress(OSError):
            process.send_signal(number)

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _closing(job: Job, code: int, args: argparse.Namespace, shown: str) -> int:
    from healthcheck.run.ending import ALERTS, NOTHING_JUDGED

    children, watched = job.summary()
    unreached = job.not_watched()
    lines = []
    ours = ALERTS if children.failed else 0 if watched else NOTHING_JUDGED
    result = code or ours
    if children.failed:
        lines.append(f"FAILED, {children.failed}")
    elif watched and code:  # no OK over a command that failed
        lines.append(f"COMMAND FAILED, {children.warned or 'no alert; ' + watched}")
    elif watched:
        lines.append(("WARNED, " if children.warned else "OK, ") + (children.warned or watched))
    else:
        lines.append("NOT JUDGED, no process of it was seen to train")
    if code:
        lines.append(f"`{shown}` itself ended with {code}")
    if unreached:
        many = f"{plural(len(unreached), 'child', 'children')} not watched"
        lines.append(
            f"{many} ({', '.join(dict.fromkeys(unreached))}): a Python that is started with -I, -E or -S, with"
        )
        lines[-1] += " another environment or in a container does not know of us; run healthcheck run there"
    if args.quiet < 2:
        _say(f"healthcheck: {lines[0]}; exit {result}")
        for line in lines[1:]:
            _say(f"  {line}")
    return result


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
