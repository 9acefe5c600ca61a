"""The command ``healthcheck``: a table of sub-commands (:mod:`healthcheck.cli.usage`), each in a module of its own.

A sub-command's module is imported when it is called, and only then. It has ``NAME``, ``HELP`` (one line
for ``--help``), ``configure(parser)`` and ``main(args) -> int``; where it stands in the help, the table says.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from healthcheck.cli.outlet import escaped_output
from healthcheck.cli.usage import TABLE, command_parser, misplaced, mistakes, overview, wrong_guess
from healthcheck.core.errors import HealthCheckError, PluginError, RuleFileError, UsageError
from healthcheck.core.text import visible_lines

_SHARE_THE_TERMINAL = ("run", "test")
"""Commands in which others write: the script, pytest. What we say there passes the console's own door."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code of :mod:`healthcheck.run.ending`."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks, by argcomplete's script, what may come next
        from healthcheck.cli.completion import answer

        answer()
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except RuleFileError as error:
        _complain(mistakes(error, sys.argv[1:] if argv is None else argv))
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
    except OSError as error:  # a name that is too long, a folder that is gone, a disk that is full
        of = f": {error.filename}" if error.filename else ""
        _complain(f"healthcheck: {error.strerror or error}{of}")
        return UsageError.exit_code


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        if len(given) > 1 and given[0] == "help":
            return _dispatch([given[1], "--help"])
        print(overview())
        return 0
    if given[0] in ("-V", "--version"):
        from healthcheck import __version__

        print(f"healthcheck {__version__}")
        return 0
    name, rest = given[0], given[1:]
    if any(entry.name == name for entry in TABLE):
        return _run_builtin(name, rest)
    code = _run_plugin_command(name, rest)
    if code is not None:
        return code
    raise UsageError(wrong_guess(given))


def _run_builtin(name: str, rest: list[str]) -> int:
    answer = misplaced(name, rest)
    if answer:
        raise UsageError(answer)
    if name != "run":  # there stdout belongs to the script
        _never_choke_on_names()
    args = command_parser(name).parse_args(rest)
    command = importlib.import_module(f"healthcheck.cli.{name}")
    if name in _SHARE_THE_TERMINAL:
        return int(command.main(args))
    with escaped_output():
        return int(command.main(args))


def _run_plugin_command(name: str, rest: list[str]) -> int | None:
    """A sub-command that an installed plugin adds; None if there is none of this name."""
    from healthcheck.assembly import plugin_host
    from healthcheck.extend.guard import describe, passes_on, place_of

    registry = plugin_host().registry
    found = registry.commands.get(name)
    if found is None:
        return None
    _never_choke_on_names()
    try:
        with escaped_output():
            return int(found[1](rest))
    except (HealthCheckError, SystemExit):  # its own usage message, or argparse's end
        raise
    except BaseException as error:
        if passes_on(error) or isinstance(error, BrokenPipeError):
            raise
        owner = registry.owners["commands", name]
        raise PluginError(
            f'the command "{name}" of the plugin "{owner}" raised {describe(error)} ({place_of(error)})'
        ) from error


def _never_choke_on_names() -> None:
    """A path or message that the terminal's encoding lacks is written escaped, as stderr always does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and getattr(sys.stdout, "errors", "") == "strict":
        reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    try:
        print(visible_lines(text), file=sys.stderr)
    except (OSError, ValueError):
        pass


def _silence_stdout() -> None:
    """Keep the interpreter from complaining about the closed pipe once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
