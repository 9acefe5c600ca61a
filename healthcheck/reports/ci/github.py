"""GitHub: workflow annotations at the rule's file and line, and a job summary in Markdown.

The annotations are workflow commands on stderr, which the runner reads like stdout; stdout belongs
to the script. GitHub shows at most ten annotations of a kind per step, so the most severe come first
and the summary holds them all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck.reports.alerttext import by_severity, excused, headline, place
from healthcheck.reports.console.closing import closing_line, count_line
from healthcheck.reports.text import step

PER_KIND = 10
_KIND = {"error": "error", "warning": "warning", "info": "notice"}


def workflow_commands(reports: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Workflow commands (``::error file=...,line=...,title=...::message``), at most ten of a kind.

    :param folder: where relative paths of rules start; GitHub wants them from the root of the checkout.
    """
    lines: list[str] = []
    shown = dict.fromkeys(_KIND.values(), 0)
    pairs = [(report, alert) for report in reports for alert in report["alerts"]]
    order = {id(alert): n for n, alert in enumerate(by_severity(alert for _, alert in pairs))}
    for report, alert in sorted(pairs, key=lambda pair: order[id(pair[1])]):
        if alert.get("explained_by") or excused(alert):
            continue
        kind = _KIND[str(alert["severity"])]
        if shown[kind] >= PER_KIND:
            continue
        shown[kind] += 1
        file, line = place(report["rules"].get(alert["rule"], {}).get("origin", ""))
        where = f"file={_property(in_checkout(file, folder))},line={line}," if line else ""
        text = headline(alert) + (f"\ntry: {alert['hint']}" if alert.get("hint") else "")
        lines.append(f"::{kind} {where}title={_property('healthcheck ' + str(alert['rule']))}::{_message(text)}")
    # Nothing judged, or a script's own error: say that at least.
    silent = [report for report in reports if report["exit_code"] and not report["alerts"]]
    return lines + [f"::error title=healthcheck::{_message(str(report['exit_words']))}" for report in silent]


def job_summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """The job summary: one table per run."""
    parts = []
    for report in reports:
        parts.append(f"### healthcheck: {_cell(str(report.get('path') or report.get('target', 'run')))}\n")
        parts.append(_cell(" ".join(closing_line(report).removeprefix("healthcheck: ").split())) + "\n")
        if report["alerts"]:
            parts.append("| | rule | step | what | try |\n|---|---|---|---|---|")
            parts += [_row(alert) for alert in by_severity(report["alerts"])]
            parts.append("")
        parts.append(count_line(report["rules"]) + "\n")
    return "\n".join(parts) + "\n"


def _row(alert: Mapping[str, Any]) -> str:
    words = (("muted", "muted"), ("accepted", "accepted"), ("explained_by", "explained by"))
    note = next((f" ({word}: {alert[key]})" for key, word in words if alert.get(key)), "")
    cells = (
        str(alert["severity"]),
        str(alert["rule"]),
        step(alert["fired_step"]),
        str(alert.get("message", "")) + note,
        str(alert.get("hint", "")),
    )
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Text from anywhere as one cell: no table, line or HTML of its own."""
    for sign, instead in (("|", "\\|"), ("<", "&lt;"), ("\r", " "), ("\n", " ")):
        text = text.replace(sign, instead)
    return text


def in_checkout(file: str, folder: Path) -> str:
    """The path from the root of the checkout, where GitHub says what that is."""
    root = os.environ.get("GITHUB_WORKSPACE")
    full = os.path.normpath(folder / file)
    if not root:
        return file
    try:
        near = os.path.relpath(full, root)
    except ValueError:  # another drive
        return file
    return file if near.startswith("..") else Path(near).as_posix()


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
