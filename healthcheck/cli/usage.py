"""What the program answers before a command runs: its table of commands, the parser, help, the right line for a wrong guess."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from healthcheck.core.errors import Problem, RuleFileError, UsageError
from healthcheck.core.text import nearest, plural, suggest

GROUPS = ("Watch", "Understand", "Tune", "Write rules", "Extend")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table: enough for the help without importing the module."""

    name: str
    group: str
    help: str


TABLE: tuple[Entry, ...] = (
    Entry("run", "Watch", "run a training script or launcher, unmodified, under rules"),
    Entry("env", "Watch", "variables that have Python processes watched"),
    Entry("top", "Watch", "watch a run in progress from another terminal"),
    Entry("mute", "Watch", "silence a rule of a run in progress"),
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

_RULE_FILES = (".yaml", ".yml")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "mpiexec", "bash", "sh", "uv", "poetry", "conda")
_LOGS = (".jsonl", ".csv", ".json", ".tfevents")
"""Endings by which a file is taken for a rule file or a recorded run in what is said of a wrong guess."""

# --------------------------------------------------------------------------- the parser


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for bad usage, and no guessing of shortened options.

    Guessing would also make every new option a breaking change: ``--re`` would stop meaning ``--report``.
    """

    def __init__(self, **given: Any) -> None:
        given.setdefault("allow_abbrev", False)
        super().__init__(**given)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; an option that is not there is answered with the nearest one that is."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            # By the letters alone: the dashes make any two options alike.
            names = [o.lstrip("-") for action in self._actions for o in action.option_strings if o.startswith("--")]
            near = nearest(word.lstrip("-"), names)
            self.error(
                f"there is no option {word}; " + (f'did you mean "--{near}"?' if near else f"see {self.prog} --help")
            )
        return found

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError`` instead of leaving the process with argparse's exit code 2."""
        if message.startswith("the following arguments are required"):  # their names alone do not say where they go
            message += f"\n  {' '.join(self.format_usage().split())}"
        raise UsageError(f"{self.prog}: {message}")


def command_parser(name: str) -> Parser:
    """The parser of one command. Imports its module, which has ``HELP`` and ``configure(parser)``."""
    module = importlib.import_module(f"healthcheck.cli.{name}")
    parser = Parser(prog=f"healthcheck {name}", description=module.HELP)
    module.configure(parser)
    return parser


def overview() -> str:
    """All sub-commands by purpose: what ``healthcheck`` alone prints. At most 15 lines: it is read, not searched."""
    from healthcheck import __version__

    lines = [f"healthcheck {__version__}: pytest for PyTorch training runs", ""]
    for group in GROUPS:
        names = ", ".join(entry.name for entry in TABLE if entry.group == group)
        lines.append(f"  {group:<{max(map(len, GROUPS))}}  {names}")
    lines += ["", "  healthcheck run train.py --your --flags      instead of: python train.py --your --flags"]
    lines.append("  healthcheck COMMAND --help                   options of one command")
    return "\n".join(lines)


# --------------------------------------------------------------------------- the right line for a wrong guess


def wrong_guess(given: Sequence[str]) -> str:
    """What to type instead of ``healthcheck train.py`` and the like."""
    word = given[0]
    line = shlex.join(given)
    if word.endswith(".py") or (Path(word).is_file() and Path(word).suffix not in (*_RULE_FILES, *_LOGS)):
        return f"healthcheck: {word} is a script; did you mean: healthcheck run {line}"
    if word == "-m":
        return f"healthcheck: did you mean: healthcheck run {line}"
    if word.endswith(_RULE_FILES):
        return f"healthcheck: {word} is a rule file; did you mean: healthcheck check {word}"
    if word.startswith("-"):
        rest = f"healthcheck run {line}"
        return f"healthcheck: options follow the command; did you mean: {rest}"
    if word in _LAUNCHERS or Path(word).name.startswith("python"):
        return f"healthcheck: did you mean: healthcheck run {line}"
    hint = suggest(word, [entry.name for entry in TABLE]) or "`healthcheck` alone lists them"
    return f'healthcheck: there is no command "{word}"; {hint}'


def misplaced(command: str, rest: Sequence[str]) -> str:
    """A file given to the wrong command: ``check train.py``, ``replay healthcheck.yaml``; empty if all is well."""
    first = _first_file(command, rest)
    if command == "check":
        if first.endswith(".py"):
            return f"healthcheck check: {first} is a script, not a rule file; did you mean: healthcheck run {first}"
        if _is_run(first):
            return f"healthcheck check: {first} is a recorded run; did you mean: healthcheck replay {first}"
        if first.endswith((".hctest.yaml", ".hctest.yml")):
            return f"healthcheck check: {first} holds rule tests; did you mean: healthcheck test {first}"
    if command == "replay" and first.endswith(_RULE_FILES):
        return f"healthcheck replay: {first} is a rule file; did you mean: healthcheck check {first}"
    if command == "runs" and first.endswith(".py"):
        return f"healthcheck runs: this lists recorded runs; did you mean: healthcheck run {first}"
    return ""


def _first_file(command: str, rest: Sequence[str]) -> str:
    """The first word that is neither an option nor an option's value."""
    if not any(word.endswith((".py", *_RULE_FILES)) or _is_run(word) for word in rest):
        return ""  # nothing that could be misplaced: the parser need not be made twice
    takes_value = {
        o for a in command_parser(command)._actions if a.nargs is None or a.nargs == 1 for o in a.option_strings
    }
    pairs = zip(("", *rest), rest, strict=False)
    return next((word for before, word in pairs if not word.startswith("-") and before not in takes_value), "")


def _is_run(word: str) -> bool:
    path = Path(word)
    return bool(word) and (
        path.suffix in _LOGS or (path / "report.json").is_file() or (path / "samples.jsonl").is_file()
    )


def nearest_file(name: str, folder: Path, pattern: str) -> str:
    """A file of ``folder`` whose name is like this one's, by the part before its ending; or an empty string."""
    here = {path.stem: path for path in sorted(folder.glob(pattern))} if folder.is_dir() else {}
    close = nearest(Path(name).stem, here)
    return f'did you mean "{here[close]}"?' if close else ""


def mistakes(error: RuleFileError, typed: Sequence[str] = ()) -> str:
    """Mistakes in rules as ``check`` shows them: the line, the place in it, what to write instead.

    :param typed: the command line: a command that reads has loaded no plugin but those that it names.
    """
    from healthcheck.assembly import not_loaded_for_reading
    from healthcheck.rulelang.problems import ordered, render_text

    found = ordered(error.problems)
    waiting: list[str] = []
    if typed and typed[0] != "run" and any(map(may_be_brought, found)):
        waiting = not_loaded_for_reading(name for word, name in pairwise(typed) if word == "-p")
    more = f"; commands that read load no configured plugin: {plugin_options(waiting)}" if waiting else ""
    return f"{render_text(found)}\n{plural(len(found), 'error')}; nothing was run{more}"


_BROUGHT = ("unknown-condition", "unknown-action", "unknown-metric", "no-such-pack")
"""Slugs of problems with a name that a plugin could define."""


def may_be_brought(problem: Problem) -> bool:
    """Whether a plugin that is not loaded could define the name that is unknown here; a clear typo is one all the same."""
    if problem.severity != "error" or problem.suggestion.startswith("did you mean"):
        return False
    short = problem.slug == "bad-value" and re.match(r'"\w+\.[\w.]+" is not one of nonfinite', problem.message)
    return problem.slug in _BROUGHT or bool(short)


def plugin_options(waiting: Sequence[str]) -> str:
    """``-p tools/health.py -p pkg.health``, as a person in this directory would type it."""
    return " ".join(f"-p {os.path.relpath(where) if where.endswith('.py') else where}" for where in waiting)
