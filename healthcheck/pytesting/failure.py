"""A failed watch as an ordinary test failure: one readable block, with paths as a person at this terminal reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import HealthCheckFailed

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.core.errors import Problem
    from healthcheck.run.session import Session


def shown(path: Path) -> str:
    """The path as a person in this directory would type it."""
    try:
        near = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return str(path) if near.startswith("..") else near


def complaint(error: Exception) -> str:
    """All problems of a rule file with the source line and a caret; else the message."""
    problems: tuple[Problem, ...] = getattr(error, "problems", ())
    if not problems:
        return str(error)
    from healthcheck.rulelang.problems import render_text

    return render_text(problems)


# --------------------------------------------------------------------------------------------------
# A failed watch as an ordinary test failure: one readable block instead of a traceback of ours.


def longrepr(error: HealthCheckFailed, place: tuple[str, int]) -> Any:
    """The block in the form that pytest prints, sends between processes and quotes in its summary."""
    try:
        from _pytest._code.code import ReprExceptionInfo, ReprFileLocation, ReprTracebackNative

        lines = [f"{line}\n" for line in str(error).splitlines()]
        where = ReprFileLocation(*place, error.headline)
        return ReprExceptionInfo(reprtraceback=ReprTracebackNative(lines), reprcrash=where)
    except (ImportError, TypeError):  # private names of another pytest version: text still says it all
        return str(error)


def failure_of(session: Session, report: Mapping[str, Any]) -> HealthCheckFailed | None:
    """What a finished session makes of its test; None if the test may pass."""
    from healthcheck.reports.wording import closing_line, verdict_word

    ending = closing_line(report)
    broken = report["plugin_errors"]
    if broken:
        first = broken[0]
        head = f'plugin "{first["plugin"]}" raised in {first["hook"]} at step {first.get("step", 0)}: {first["error"]}'
        others = [f'  also "{e["plugin"]}" in {e["hook"]}: {e["error"]}' for e in broken[1:]]
        return HealthCheckFailed(head, [f"  at {first.get('place') or 'loading'}", *others, ending])
    if report["exit_code"] == 0:
        return None
    failing = failing_alerts(session, report)
    if failing:
        lines = block(session, failing[0], report)
        return HealthCheckFailed(lines[0], [*lines[1:], *_others(session, failing[0]), ending])
    reasons = [
        f"  {rule}: {entry.get('reason', '')}"
        for rule, entry in report["rules"].items()
        if entry["verdict"] == "not judged" and report["steps"]
    ]
    if not report["steps"]:
        reasons = ["  the test made no optimizer update in this process; does it train at all, or in another process?"]
    trace = [f"  {line}" for e in report["internal_errors"] for line in str(e.get("traceback", "")).splitlines()]
    return HealthCheckFailed(f"{verdict_word(report)}, {report['exit_words']}", [*(trace or reasons), ending])


def failing_alerts(session: Session, report: Mapping[str, Any]) -> list[Alert]:
    """Alerts that fail the test, the cause first: unexplained before explained, severe before mild, then in order."""
    from healthcheck.core.alerts import Severity

    level = str(report.get("fail_on", "error"))
    stopped = (report.get("stop") or {}).get("rule")
    failing = [
        a
        for a in session.alerts
        if a.counts and (a.rule == stopped or (level != "never" and a.severity >= Severity.parse(level)))
    ]
    return sorted(failing, key=lambda a: (bool(a.explained_by), -a.severity, a.number))


def block(session: Session, alert: Alert, report: Mapping[str, Any]) -> list[str]:
    """One alert: rule, step, value, normal, hint, place of the rule, evidence."""
    from healthcheck.core.text import number, step
    from healthcheck.reports.alertblock import action_text, evidence_path, facts_text

    entry = report["rules"].get(alert.rule, {})
    lines = [f"{alert.name} at step {step(alert.fired_step)}: {alert.message}"]
    scored = alert.score is not None and alert.score != alert.value and math.isfinite(alert.value)
    score = f", score {number(alert.score)}" if scored else ""
    lines.append(f"  value     {number(alert.value)}{score}; limit: {alert.threshold}")
    lines.append(f"  normal    {_normal(session, alert)}")
    seen = "; ".join(facts_text(alert))
    if seen:
        lines.append(f"  seen      {seen}")
    done = "; ".join(dict.fromkeys(text for text in map(action_text, alert.actions) if text))
    if done:
        lines.append(f"  done      {done}")
    if alert.hint:
        lines.append(f"  try       {alert.hint}")
    lines.append(f"  rule      {entry.get('origin') or 'unknown place'} ({alert.severity})")
    evidence = evidence_path(alert)
    if evidence:
        lines.append(f"  evidence  {shown(Path(evidence))}")
    elif session.info.run_dir is not None:
        lines.append(f"  record    {shown(session.info.run_dir)}")
    return lines


def _normal(session: Session, alert: Alert) -> str:
    from healthcheck.core.text import number, plural

    if alert.normal is not None and math.isfinite(alert.normal):
        return number(alert.normal)
    for at, value in reversed(session.history(alert.series[0].name, 50) if alert.series else []):
        if at < alert.fired_step and math.isfinite(value):
            return f"{number(value)}, {plural(alert.fired_step - at, 'step')} earlier"
    return "unknown, nothing finite was seen before"


def _others(session: Session, first: Alert) -> list[str]:
    from healthcheck.core.text import step

    lines = []
    for alert in session.alerts:
        if alert is not first:
            why = next((f", {w}: {t}" for w, t in (("muted", alert.muted), ("accepted", alert.accepted)) if t), "")
            why = f", explained by {alert.explained_by}" if alert.explained_by else why
            lines.append(f"  also      {alert.rule} at step {step(alert.fired_step)} ({alert.severity}){why}")
    return lines[:5] + ([f"  also      {len(lines) - 5} more alerts"] if len(lines) > 5 else [])
