"""Which recorded runs and which of their alerts a person means: ``[RUN] [N | RULE]``, and ages such as ``14d``."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable
from typing import Any

from healthcheck.core.errors import HealthCheckError, UsageError
from healthcheck.core.text import suggest
from healthcheck.extend.host import PluginHost
from healthcheck.record.runs import Run, find_run
from healthcheck.rulelang.rule import RuleSet

_SEVERITIES = {"error": 2, "warning": 1, "info": 0}


def add_choice(parser: argparse.ArgumentParser, default: str) -> None:
    """The positional words; ``default`` says which alert is meant without any."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="[RUN] [N | RULE]",
        help=f"a run (default: latest), and which of its alerts (default: {default})",
    )


def run_and_alert(words: list[str], command: str) -> tuple[Run, str | None]:
    """The run and the alert that are meant; one word alone may be either."""
    if len(words) > 2:
        raise UsageError(f"healthcheck {command} takes a run and an alert: healthcheck {command} [RUN] [N | RULE]")
    if len(words) == 2:
        return find_run(words[0]), words[1]
    if not words:
        return find_run(), None
    word = words[0]
    if word.isdigit():
        return find_run(), word
    # A rule of the latest run before a run of that name: runs are named by date and script, so the two hardly meet.
    try:
        latest = find_run()
    except UsageError:
        return find_run(word), None
    if word in rule_ids(latest):
        return latest, word
    try:
        return find_run(word), None
    except UsageError as error:
        hint = suggest(word, rule_ids(latest))
        if hint:
            raise UsageError(f'"{word}" is neither a run nor a rule of {latest.name}; {hint}') from None
        raise error


def rule_ids(run: Run) -> list[str]:
    """Rules of a run, those that fired first."""
    known = dict.fromkeys(str(alert["rule"]) for alert in run.alerts)
    return list(known | dict.fromkeys((run.report or {}).get("rules", {})))


def worst_first(alerts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a person wants to see first: not muted, not explained by another, most severe, earliest."""
    return sorted(
        alerts,
        key=lambda a: (
            bool(a.get("muted")),
            bool(a.get("explained_by")),
            -_SEVERITIES.get(a["severity"], 0),
            a["number"],
        ),
    )


def numbered(run: Run, number: int) -> dict[str, Any]:
    """The alert with this number. Raises ``UsageError`` that says which there are."""
    for alert in run.alerts:
        if alert["number"] == number:
            return alert
    there = f"1 to {len(run.alerts)}" if len(run.alerts) > 1 else "1" if run.alerts else "none"
    raise UsageError(f"{run.name} has no alert {number}; its alerts: {there}")


# --------------------------------------------------------------------------- how old a run is

_AGE = re.compile(r"^(\d+(?:\.\d+)?)\s*([mhdw])$")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_since(text: str | None, option: str = "--since") -> float:
    """``14d`` in seconds; infinity without a limit. Raises ``UsageError`` for another form."""
    if text is None:
        return float("inf")
    match = _AGE.match(text.strip())
    if match is None:
        raise UsageError(f'{option} "{text}": write a number with m, h, d or w, such as 14d')
    return float(match[1]) * _SECONDS[match[2]]


def age(run: Run) -> float:
    """Seconds since it began."""
    return time.time() - run.began


def rules_of(run: Run, host: PluginHost) -> tuple[RuleSet | None, str]:
    """The rules that judged the run, or None and why they cannot be compiled here."""
    from healthcheck.assembly import load_rules_for

    if not run.rules_file.is_file():
        return None, "the record has no rules.yaml"
    try:
        return load_rules_for(rules=[str(run.rules_file)], host=host), ""
    except HealthCheckError as error:
        return None, f"its rules cannot be read here ({str(error).splitlines()[0]}); a plugin may be missing: -p PLUGIN"
