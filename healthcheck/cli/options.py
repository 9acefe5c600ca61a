"""Arguments that several commands share: spelled, explained and read in one place.

Each ``add_...`` puts its arguments on a parser; the functions below them turn what was typed into what the rest of the
program takes: plugins into a host, rule options into a :class:`~healthcheck.assembly.RuleChoice`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def local_plugins(args: argparse.Namespace | None = None) -> list[str]:
    """Plugins that nobody installed: those that ``pyproject.toml`` names, then those of ``-p``.

    :param args: what was typed, for commands with ``-p``.
    """
    from healthcheck.rulelang.discover import configured_plugins

    return [*configured_plugins(), *(args.plugins if args is not None else ())]


def loaded_host(args: argparse.Namespace | None = None) -> PluginHost:
    """Built-ins, installed plugins and local ones. One that could not be loaded costs a line on stderr, not the command.

    :param args: what was typed, for commands with ``-p``.
    """
    from healthcheck.assembly import plugin_host

    host = plugin_host(local_plugins(args))
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
