"""Many replayed runs as one table: verdict, first alert, its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.reports.tables import table_lines
from healthcheck.text import plural, step

NAME_WIDTH = 60
MOST = 60
"""Up to so many runs each has its line; of more, those that are ok are counted only."""


def first_alert(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first alert that counts; else None."""
    for alert in report["alerts"]:
        if not (alert.get("muted") or alert.get("accepted")):
            return dict(alert)
    return None


def table(reports: Sequence[Mapping[str, Any]], *, whole: bool = False) -> list[str]:
    """One line per run, and how often each rule fired. ``whole``: also for those that are ok among very many."""
    shown = reports if whole or len(reports) <= MOST else [r for r in reports if r["verdict"] != "ok"]
    rows = []
    for report in shown:
        first = first_alert(report)
        rows.append(
            [
                _short(str(report["path"])),
                str(report["verdict"]),
                str(first["rule"]) if first else _why(report),
                step(first["fired_step"]) if first else "-",
                str(len(report["alerts"])),
                step(report["record"]["last_step"]),
            ]
        )
    lines = table_lines(rows, "lllrrr", heads=("run", "verdict", "first alert", "step", "alerts", "last step"))
    if len(shown) < len(reports):
        lines.append(f"  and {plural(len(reports) - len(shown), 'run')} that are ok (--timeline lists them)")
    return [*lines, *by_rule(reports)]


def by_rule(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """``loss-spike fired in 3 runs``, most frequent first."""
    fired = Counter(rule for report in reports for rule in {alert["rule"] for alert in report["alerts"]})
    if not fired:
        return []
    return ["", *table_lines([[rule, f"fired in {plural(n, 'run')}"] for rule, n in fired.most_common()])]


def _why(report: Mapping[str, Any]) -> str:
    return str(report["exit_words"]) if report["exit_reason"] == "nothing_judged" else "-"


def _short(path: str) -> str:
    return path if len(path) <= NAME_WIDTH else "..." + path[-(NAME_WIDTH - 3) :]
