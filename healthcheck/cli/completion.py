"""``healthcheck completion bash``: completion of commands, options, rules and runs in your shell.

argcomplete has the scripts for the shells and walks our parsers; ours are the words that no parser knows: which rules
are in force here and which runs were recorded here. It is an extra, ``torch-healthcheck[completion]``, imported by
nothing but this file. click was tried: it brings completion too, but takes 24 ms to import where argparse takes 2,
a third of what ``healthcheck --help`` takes in all.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from healthcheck.cli.usage import TABLE, Parser, command_parser
from healthcheck.core.errors import UsageError
from healthcheck.core.text import suggest

NAME = "completion"
HELP = "completion of commands, options, rules and runs for your shell"

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("healthcheck", "torch-healthcheck")
EXTRA = "pip install 'torch-healthcheck[completion]'"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"once:  {EXTRA}\n"
        "bash:  healthcheck completion bash > ~/.local/share/bash-completion/completions/healthcheck\n"
        "zsh:   healthcheck completion zsh > ~/.zfunc/_healthcheck      (a folder of $fpath)\n"
        "fish:  healthcheck completion fish > ~/.config/fish/completions/healthcheck.fish\n"
        'at once, in this shell:  eval "$(healthcheck completion bash)"'
    )
    parser.add_argument("shell", nargs="?", metavar="SHELL", help=", ".join(SHELLS))


def main(args: argparse.Namespace) -> int:
    known = ", ".join(SHELLS)
    if args.shell is None:
        raise UsageError(f"healthcheck completion: which shell? healthcheck completion bash (or one of {known})")
    if args.shell not in SHELLS:
        hint = suggest(args.shell, SHELLS) or f"there are {known}"
        raise UsageError(f'healthcheck completion: no script for the shell "{args.shell}"; {hint}')
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError:
        raise UsageError(f"healthcheck completion: argcomplete is not installed: {EXTRA}") from None
    print(shellcode(PROGRAMS, shell=args.shell), end="")
    return 0


def answer() -> None:
    """Tell the shell that asks what may come next, and leave the process: somebody is in the middle of typing.

    The shell asks by calling the program with argcomplete's variables set. Nothing is printed on standard output or
    standard error; argcomplete answers on a descriptor of its own.
    """
    try:
        import argcomplete
    except ModuleNotFoundError:
        sys.exit(1)  # the script for the shell then falls back to file names
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))]
    # Without options for an empty word: after a space file names and rules are what is looked for.
    argcomplete.autocomplete(parser_of(line), always_complete_options=False, exclude=_behind_the_script(line))


def parser_of(line: str) -> argparse.ArgumentParser:
    """One parser of the whole program, in which the command that stands in the line has its arguments."""
    typed = line.split()[1:2]
    parser = Parser(prog="healthcheck")
    commands = parser.add_subparsers(parser_class=Parser)
    names = [entry.name for entry in TABLE]
    commands.add_parser("help", help="the options of one command").add_argument("command", choices=names)
    for entry in TABLE:
        command = commands.add_parser(entry.name, help=entry.help)
        if [entry.name] != typed:
            continue  # its module need not be imported
        importlib.import_module(f"healthcheck.cli.{entry.name}").configure(command)
        for action in command._actions:
            for kind, words in _WORDS.items():
                if str(action.metavar).startswith(kind):
                    action.completer = words  # type: ignore[attr-defined]
                    break
    return parser


def _behind_the_script(line: str) -> list[str]:
    """Our options where the script was named already: what follows belongs to it. argcomplete offers them up to the end."""
    words = line.rpartition(" ")[0].split()
    if words[1:2] != ["run"]:
        return []
    parser = command_parser("run")
    with contextlib.suppress(UsageError):
        if parser.parse_args(words[2:]).target is not None:
            return [option for action in parser._actions for option in action.option_strings]
    return []


def _run_names(**asked: Any) -> Iterator[str]:
    from healthcheck.record.folder import list_runs
    from healthcheck.record.runs import reading_folder

    names = [path.name for path in list_runs(reading_folder())]
    yield from (["latest", *names] if names else [])


def _rule_names(**asked: Any) -> Iterator[str]:
    """Rules in force here; those of a file with mistakes too, as far as they can be read."""
    from healthcheck.cli.options import loaded_host
    from healthcheck.rulelang.compile import load_all
    from healthcheck.rulelang.discover import discover

    yield from load_all(discover(None).sources, registry=loaded_host().registry).merged.rules


def _runs_and_alerts(**asked: Any) -> Iterator[str]:
    from healthcheck.record.runs import latest_run

    yield from _run_names()
    run = latest_run()
    if run is not None:
        yield from dict.fromkeys(str(alert["rule"]) for alert in run.alerts)


def _report_kinds(**asked: Any) -> Iterator[str]:
    yield from ("json=", "junit=", "sarif=", "html=", "github")


_WORDS: dict[str, Callable[..., Iterator[str]]] = {
    "[RUN] [N | RULE]": _runs_and_alerts,
    "RUN": _run_names,
    "RULE": _rule_names,
    "KIND=PATH": _report_kinds,
}
"""How a placeholder in the help begins -> the words that may stand for it."""
