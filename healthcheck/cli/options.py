"""Arguments that several commands share: spelled, explained and read in one place.

Each ``add_...`` puts its arguments on a parser; the functions below them turn what was typed into what the rest of the
program takes: plugins into a host, rule options into a :class:`~healthcheck.assembly.RuleChoice`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.text import strict

if TYPE_CHECKING:
    from healthcheck.assembly import RuleChoice
    from healthcheck.extend.host import PluginHost

SEVERITIES = ("info", "warning", "error", "never")

# --------------------------------------------------------------------------- arguments


def add_rule_sources(parser: argparse.ArgumentParser) -> None:
    """Where rules come from: ``--rules`` and ``--profile``."""
    parser.add_argument(
        "--rules", action="append", metavar="FILE", help="rule file or pack; repeatable, later ones win"
    )
    add_profile(parser)


def add_profile(parser: argparse.ArgumentParser, help: str = "profile of the rule file to apply") -> None:
    parser.add_argument("--profile", metavar="NAME", help=help)


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Which rules, and what is changed of them: ``run``, ``replay`` and ``plan``. Read by :func:`rule_choice`."""
    add_rule_sources(parser)
    add = parser.add_argument
    add(
        "--off",
        action="append",
        default=[],
        metavar="RULE",
        help="switch a rule off, or one cause: RULE.CAUSE; repeatable",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="RULE",
        help="judge only these rules, or causes as RULE.CAUSE; repeatable",
    )
    add("--set", action="append", default=[], metavar="RULE.KEY=VALUE", help="change one key of a rule; repeatable")
    add("--mute", action="append", default=[], metavar="RULE@A..B", help="judge, but do not act in these steps")
    add("--force", action="store_true", help="let --mute name rules for NaN and infinity too")


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    """``-p PLUGIN``. Read by :func:`loaded_host`."""
    parser.add_argument(
        "-p",
        dest="plugins",
        action="append",
        default=[],
        metavar="PLUGIN",
        help="local plugin: a file or module; repeatable",
    )


def add_fail_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fail-on", choices=SEVERITIES, help="exit 1 from this severity (default error)")


def add_report_option(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--report", action="append", default=[], metavar="KIND=PATH", help=f"{help}; repeatable")


def add_format(parser: argparse.ArgumentParser, *more: str, help: str = "json: for scripts") -> None:
    """``--format text|json`` and what one command has beside them."""
    parser.add_argument("--format", choices=("text", "json", *more), default="text", help=help)


def add_run(parser: argparse.ArgumentParser) -> None:
    """The record to look at; without a word the latest."""
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="a run (default: latest)")


def add_records_folder(parser: argparse.ArgumentParser) -> None:
    """The folder with all records. Read by :func:`records_folder`."""
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="folder of records (default: HEALTHCHECK_RUNS, else healthcheck-runs)",
    )


# --------------------------------------------------------------------------- what was typed


def rule_choice(args: argparse.Namespace) -> RuleChoice:
    """What :func:`add_rule_options` read, as :func:`healthcheck.assembly.load_rules_for` takes it."""
    return {
        "rules": args.rules,
        "profile": args.profile,
        "off": args.off,
        "only": args.only,
        "set": args.set,
        "mute": args.mute,
        "force": args.force,
    }


def loaded_host(args: argparse.Namespace | None = None) -> PluginHost:
    """Built-ins, installed plugins and those of ``-p``. One that could not be loaded costs a line on stderr, not the command.

    For commands that read. What ``pyproject.toml`` names is code of a folder that somebody only looks at, and is not run.

    :param args: what was typed, for commands with ``-p``.
    """
    from healthcheck.assembly import plugin_host

    host = plugin_host(args.plugins if args is not None else ())
    for failure in host.failures:
        print(f"healthcheck: {failure}", file=sys.stderr)
    return host


def records_folder(args: argparse.Namespace) -> Path:
    """The folder that was named, else the usual one; it need not exist."""
    from healthcheck.record.runs import reading_folder

    return Path(args.folder) if args.folder else reading_folder()


# --------------------------------------------------------------------------- what is printed


def print_json(content: Any) -> None:
    """What ``--format json`` prints: strict JSON, in which a NaN is the text ``"nan"``."""
    print(json.dumps(strict(content), indent=1, allow_nan=False))


# --------------------------------------------------------------------------- the words of a run


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, in the words of ``settings:``."""
    given: dict[str, Any] = {}
    if args.observe:
        given["mode"] = "observe"
    if getattr(args, "live", False):  # of `run` alone
        given["live"] = True
    if args.fail_on:
        given["fail_on"] = args.fail_on
    if args.max_steps is not None:
        given["max_steps"] = _steps(args.max_steps)
    if args.max_time is not None:
        given["max_time"] = _seconds(args.max_time)
    verbosity = args.verbose - args.quiet
    if verbosity:
        given["verbosity"] = max(-2, min(1, verbosity))
    return given


def _steps(text: str) -> int:
    plain = text.replace("_", "").replace(",", "")
    if not plain.isdigit() or int(plain) < 1:
        raise UsageError(f"healthcheck run: --max-steps takes a number of steps from 1, not {text!r}")
    return int(plain)


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"healthcheck run: --max-time takes a time such as 90s, 5m or 2h, not {text!r}")
    return seconds


def given_reports(given: Sequence[str]) -> dict[str, str]:
    """Kind -> path; which kinds there are is known once the plugins are loaded."""
    found: dict[str, str] = {}
    for item in given:
        kind, equals, path = item.partition("=")
        if not kind or (equals and not path):
            raise UsageError(f"healthcheck run: --report takes KIND=PATH, for instance json=hc.json, not {item!r}")
        if kind in found:
            raise UsageError(f"healthcheck run: --report {kind} is given twice ({found[kind]} and {path})")
        found[kind] = path
    return found
