"""Options that several commands share, so that they are spelled and explained alike."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthcheck.assembly import RuleChoice


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Which rules: ``run``, ``replay`` and ``plan``."""
    add = parser.add_argument
    add("--rules", action="append", metavar="FILE", help="rule file or pack; repeatable, later ones win")
    add("--profile", metavar="NAME", help="profile of the rule file to apply")
    add("--off", action="append", default=[], metavar="RULE", help="switch a rule off; repeatable")
    add("--only", action="append", default=[], metavar="RULE", help="judge only these rules; repeatable")
    add("--set", action="append", default=[], metavar="RULE.KEY=VALUE", help="change one key of a rule; repeatable")
    add("--mute", action="append", default=[], metavar="RULE@A..B", help="judge, but do not act in these steps")
    add("--force", action="store_true", help="let --mute name rules for NaN and infinity too")


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        dest="plugins",
        action="append",
        default=[],
        metavar="PLUGIN",
        help="local plugin: a file or module; repeatable",
    )


def rule_choice(args: argparse.Namespace) -> RuleChoice:
    """What the command line said, as :func:`healthcheck.assembly.load_rules_for` takes it."""
    return {
        "rules": args.rules,
        "profile": args.profile,
        "off": args.off,
        "only": args.only,
        "set": args.set,
        "mute": args.mute,
        "force": args.force,
    }
