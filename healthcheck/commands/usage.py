"""Help of the command ``healthcheck``, and the right line for a wrong guess."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from healthcheck.dispatch import suggest
from healthcheck.errors import RuleFileError, UsageError

if TYPE_CHECKING:
    from healthcheck.commands import Entry

_RULE_FILES = (".yaml", ".yml")
_LOGS = (".jsonl", ".csv", ".json", ".tfevents")


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for bad usage, and no guessing of shortened options."""

    def __init__(self, **given: Any) -> None:
        given.setdefault("allow_abbrev", False)
        super().__init__(**given)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].split("=")[0]
            hint = _nearest_option(word, [option for action in self._actions for option in action.option_strings])
            message = f"there is no option {word}; {hint or 'see ' + self.prog + ' --help'}"
        elif message.startswith("the following arguments are required"):
            message += f"\n  {' '.join(self.format_usage().split())}"
        raise UsageError(f"{self.prog}: {message}")


def _nearest_option(word: str, options: Iterable[str]) -> str:
    """A suggestion by the letters alone: dashes make any two options alike."""
    names = {option.lstrip("-"): option for option in options if option.startswith("--")}
    hint = suggest(word.lstrip("-"), names)
    return hint.replace('"', '"--', 1) if hint else ""


def nearest_file(name: str, folder: Path, pattern: str) -> str:
    """A file of ``folder`` whose name is like this one's, by the part before its ending; or an empty string."""
    here = {path.stem: path for path in sorted(folder.glob(pattern))} if folder.is_dir() else {}
    close = difflib.get_close_matches(Path(name).stem, here, n=1)
    return f'did you mean "{here[close[0]]}"?' if close else ""


def mistakes(error: RuleFileError) -> str:
    """Mistakes in rules as ``check`` shows them: the line, the place in it, what to write instead."""
    from healthcheck.reports.text import plural
    from healthcheck.rulelang.problems import ordered, render_text

    found = ordered(error.problems)
    return f"{render_text(found)}\n{plural(len(found), 'error')}; nothing was run"


def overview(entries: Iterable[Entry]) -> str:
    """All sub-commands by purpose: what ``healthcheck`` alone prints, in 15 lines."""
    from healthcheck import __version__

    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    names = [entry.name for listed in groups.values() for entry in listed]
    lines = [f"healthcheck {__version__}: pytest for PyTorch training runs", ""]
    width = max(len(group) for group in groups)
    if len(names) + len(lines) + 3 <= 15:
        for group, listed in groups.items():
            for i, entry in enumerate(listed):
                lines.append(f"  {group if i == 0 else '':<{width}}  {entry.name:<8} {entry.help}")
    else:
        for group, listed in groups.items():
            lines.append(f"  {group:<{width}}  {', '.join(entry.name for entry in listed)}")
    lines += ["", "  healthcheck run train.py --your --flags      instead of: python train.py --your --flags"]
    lines.append("  healthcheck COMMAND --help                   options of one command")
    return "\n".join(lines)


def wrong_guess(given: Sequence[str], known: Iterable[str]) -> str:
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
    if word in ("python", "python3", "torchrun", "accelerate", "deepspeed", "srun"):
        return f"healthcheck: did you mean: healthcheck run {line}"
    hint = suggest(word, known) or "`healthcheck` alone lists them"
    return f'healthcheck: there is no command "{word}"; {hint}'


def misplaced(command: str, rest: Sequence[str]) -> str:
    """A file given to the wrong command: ``check train.py``, ``replay healthcheck.yaml``; empty if all is well."""
    first = next((word for word in rest if not word.startswith("-")), "")
    if command == "check":
        if first.endswith(".py"):
            return f"healthcheck check: {first} is a script, not a rule file; did you mean: healthcheck run {first}"
        if _is_run(first):
            return f"healthcheck check: {first} is a recorded run; did you mean: healthcheck replay {first}"
    if command == "replay" and first.endswith(_RULE_FILES):
        return f"healthcheck replay: {first} is a rule file; did you mean: healthcheck check {first}"
    if command == "runs" and first.endswith(".py"):
        return f"healthcheck runs: this lists recorded runs; did you mean: healthcheck run {first}"
    return ""


def _is_run(word: str) -> bool:
    path = Path(word)
    return bool(word) and (
        path.suffix in _LOGS or (path / "report.json").is_file() or (path / "samples.jsonl").is_file()
    )
