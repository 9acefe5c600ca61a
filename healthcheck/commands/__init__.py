"""The command ``healthcheck``: a table of sub-commands, each in a module of its own.

A sub-command's module is imported when it is called, and only then. It has ``NAME``, ``HELP`` (one line
for ``--help``), ``configure(parser)`` and ``main(args) -> int``; where it stands in the help, the table says.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.errors import HealthCheckError, RuleFileError, UsageError

GROUPS = ("Watch", "Understand", "Tune", "Write rules", "Extend")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table: enough for the help without importing the module."""

    name: str
    group: str
    help: str


TABLE: tuple[Entry, ...] = (
    Entry("run", "Watch", "run a training script, unmodified, under rules"),
    Entry("top", "Watch", "watch a run that goes on in another terminal"),
    Entry("mute", "Watch", "silence a rule of a run that goes on"),
    Entry("why", "Understand", "why an alert fired, with its numbers"),
    Entry("evidence", "Understand", "what was kept for an alert, and how to load it"),
    Entry("explain", "Understand", "what a rule checks and what to do about it"),
    Entry("metrics", "Understand", "metrics that exist, or what is normal for a run"),
    Entry("report", "Understand", "show the record of a run again"),
    Entry("runs", "Understand", "list recorded runs"),
    Entry("prune", "Understand", "delete old records"),
    Entry("replay", "Tune", "judge recorded runs by rules"),
    Entry("plan", "Tune", "which rules will be judged here, and what they may do"),
    Entry("accept", "Tune", "take the alerts of a run as known; only new ones fail"),
    Entry("init", "Write rules", "write a healthcheck.yaml to start from"),
    Entry("check", "Write rules", "find every mistake in rule files"),
    Entry("test", "Write rules", "run the tests of rules"),
    Entry("schema", "Write rules", "the schema of rule files, for editors"),
    Entry("plugins", "Extend", "plugins that are loaded and what they add"),
    Entry("doctor", "Extend", "is everything in order on this machine?"),
    Entry("completion", "Extend", "completion for bash, zsh and fish"),
)
"""Built-in sub-commands, by group, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code of :mod:`healthcheck.outcome`."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(given)
    except RuleFileError as error:
        from healthcheck.commands.usage import mistakes

        _complain(mistakes(error))
        return error.exit_code
    except UsageError as error:
        _complain(str(error))
        return error.exit_code
    except HealthCheckError as error:
        _complain(f"healthcheck: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 2
    except BrokenPipeError:  # `healthcheck metrics | head`
        _silence_stdout()
        return 0


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        if len(given) > 1 and given[0] == "help":
            return _dispatch([given[1], "--help"])
        from healthcheck.commands.usage import overview

        print(overview(list(TABLE)))
        return 0
    if given[0] in ("-V", "--version"):
        from healthcheck import __version__

        print(f"healthcheck {__version__}")
        return 0
    name, rest = given[0], given[1:]
    if any(entry.name == name for entry in TABLE):
        return _run_builtin(importlib.import_module(f"{__name__}.{name}"), rest)
    code = _run_plugin_command(name, rest)
    if code is not None:
        return code
    from healthcheck.commands.usage import wrong_guess

    raise UsageError(wrong_guess(given, [entry.name for entry in TABLE]))


def _run_builtin(module: Any, rest: list[str]) -> int:
    from healthcheck.commands.usage import Parser, misplaced

    answer = misplaced(module.NAME, rest)
    if answer:
        raise UsageError(answer)
    if module.NAME != "run":  # there stdout belongs to the script
        _never_choke_on_names()
    parser = Parser(prog=f"healthcheck {module.NAME}", description=module.HELP)
    module.configure(parser)
    return int(module.main(parser.parse_args(rest)))


def _run_plugin_command(name: str, rest: list[str]) -> int | None:
    """A sub-command that an installed plugin adds; None if there is none of this name."""
    from healthcheck.assembly import plugin_host

    found = plugin_host().registry.commands.get(name)
    if found is None:
        return None
    _never_choke_on_names()
    return int(found[1](rest))


def _never_choke_on_names() -> None:
    """A path or message that the terminal's encoding lacks is written escaped, as stderr always does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and getattr(sys.stdout, "errors", "") == "strict":
        reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except (OSError, ValueError):
        pass


def _silence_stdout() -> None:
    """Keep the interpreter from complaining about the closed pipe once more when it exits."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
