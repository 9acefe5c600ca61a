"""GitHub: workflow annotations at the rule's file and line, and a job summary in Markdown.

GitHub shows at most ten annotations of a kind per step, so the most severe come first and the
summary holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.reports.closing import closing_line, count_line
from healthcheck.reports.junit import by_severity, headline, place

PER_KIND = 10
_KIND = {"error": "error", "warning": "warning", "info": "notice"}


def annotations(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Workflow commands (``::error file=...,line=...,title=...::message``), at most ten of a kind."""
    lines: list[str] = []
    shown = dict.fromkeys(_KIND.values(), 0)
    for report in reports:
        for alert in by_severity(report["alerts"]):
            if alert.get("explained_by") or alert.get("muted") or alert.get("accepted"):
                continue
            kind = _KIND[str(alert["severity"])]
            if shown[kind] >= PER_KIND:
                continue
            shown[kind] += 1
            file, line = place(report["rules"].get(alert["rule"], {}).get("origin", ""))
            where = f"file={_property(file)},line={line}," if line else ""
            text = headline(alert) + (f"\ntry: {alert['hint']}" if alert.get("hint") else "")
            lines.append(f"::{kind} {where}title={_property('healthcheck ' + str(alert['rule']))}::{_message(text)}")
    return lines


def summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """The job summary: one table per run."""
    parts = []
    for report in reports:
        parts.append(f"### healthcheck: {_cell(str(report.get('path') or report.get('target', 'run')))}\n")
        parts.append(f"{closing_line(report).removeprefix('healthcheck: ')}\n")
        if report["alerts"]:
            parts.append("| | rule | step | what | try |\n|---|---|---|---|---|")
            parts += [_row(alert) for alert in by_severity(report["alerts"])]
            parts.append("")
        parts.append(count_line(report["rules"]) + "\n")
    return "\n".join(parts)


def _row(alert: Mapping[str, Any]) -> str:
    note = next(
        (
            f" ({word}: {alert[key]})"
            for key, word in (("muted", "muted"), ("accepted", "accepted"), ("explained_by", "explained by"))
            if alert.get(key)
        ),
        "",
    )
    cells = (
        str(alert["severity"]),
        str(alert["rule"]),
        f"{alert['fired_step']:,}",
        str(alert.get("message", "")) + note,
        str(alert.get("hint", "")),
    )
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
