"""What may come next on a command line of ours: commands, options, rules, runs. One answer for all shells.

An empty answer means file names, which the shell completes better than we do. Nothing here may fail or print:
a person is in the middle of typing.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from healthcheck.commands.usage import Parser

if TYPE_CHECKING:
    from healthcheck.commands import Entry

_RUNS, _RULES, _EITHER = "RUN", "RULE", "[RUN] [N | RULE]"


def candidates(words: Sequence[str], table: Sequence[Entry]) -> list[str]:
    """Words that begin like the last of ``words`` and are possible there.

    :param words: what was typed after ``healthcheck``, the word at the cursor last (perhaps empty).
    """
    typed = list(words) or [""]
    before, current = typed[:-1], typed[-1]
    if not before or before == ["help"]:
        return [entry.name for entry in table if entry.name.startswith(current)]
    if before[0] not in {entry.name for entry in table}:
        return []
    parser = Parser(prog="healthcheck", add_help=True)
    module = importlib.import_module(f"healthcheck.commands.{before[0]}")
    module.configure(parser)
    return sorted({word for word in _possible(parser, before, current) if word.startswith(current)})


def _possible(parser: argparse.ArgumentParser, before: Sequence[str], current: str) -> Iterator[str]:
    options = {name: action for action in parser._actions for name in action.option_strings}
    waiting = options.get(before[-1]) if len(before) > 1 else None
    if waiting is not None and waiting.nargs != 0:
        yield from _values(waiting)
        return
    if before[0] == "run" and _target_is_there(before[1:], options):
        return  # the script's own arguments
    if current.startswith("-"):
        yield from (name for name, action in options.items() if action.help is not argparse.SUPPRESS)
        return
    for action in parser._actions:
        if not action.option_strings:
            yield from _values(action)


def _values(action: argparse.Action) -> Iterator[str]:
    """What an option or a positional word may be; nothing for files and free text."""
    if action.choices is not None:
        yield from map(str, action.choices)
        return
    metavar = str(action.metavar or "")
    for kind, words in _SOURCES.items():
        if metavar == kind or metavar.startswith((f"{kind}.", f"{kind}@")):
            yield from words()


def _target_is_there(words: Sequence[str], options: dict[str, argparse.Action]) -> bool:
    """Whether the script was named already: what follows belongs to it."""
    value = False
    for word in words:
        if value or word.startswith("-"):
            action = options.get(word)
            value = not value and action is not None and action.nargs != 0
            continue
        return True
    return False


def _run_names() -> Iterator[str]:
    from healthcheck.record.folder import list_runs
    from healthcheck.record.runs import reading_folder

    names = [path.name for path in list_runs(reading_folder())]
    yield from (["latest", *names] if names else [])


def _rule_names() -> Iterator[str]:
    """Rules in force here; those of a file with mistakes too, as far as they can be read."""
    from healthcheck.assembly import plugin_host
    from healthcheck.rulelang.compile import load_all
    from healthcheck.rulelang.discover import configured_plugins, discover

    registry = plugin_host(configured_plugins()).registry
    yield from load_all(discover(None).sources, registry=registry).merged.rules


def _alerts_of_latest() -> Iterator[str]:
    from healthcheck.record.runs import latest_run

    run = latest_run()
    if run is not None:
        yield from dict.fromkeys(str(alert["rule"]) for alert in run.alerts)


def _runs_and_alerts() -> Iterator[str]:
    yield from _run_names()
    yield from _alerts_of_latest()


def _report_kinds() -> Iterator[str]:
    yield from ("json=", "junit=", "sarif=", "html=", "github")


_SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    _EITHER: _runs_and_alerts,
    _RUNS: _run_names,
    _RULES: _rule_names,
    "KIND=PATH": _report_kinds,
}
"""Placeholder in the help -> the words that may stand for it."""
