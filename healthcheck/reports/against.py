"""``healthcheck run --against RUN``: what became of the alerts of an earlier run, in this one. The proof of a fix.

Silence proves nothing by itself: an alert counts as gone only where its cause was judged in this run, to at least the step at which it
had fired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from healthcheck.core.protocols import Session
from healthcheck.core.text import step
from healthcheck.extend.hookspecs import hookimpl

JUDGED = ("ok", "failed", "warned", "partly judged")
SHOWN = 5
"""Alerts of each kind that the console names; the report has all."""


class Against:
    """Compares this run with the record of an earlier one, when its report is complete: key ``against``.

    :param run: what the earlier run is called.
    :param before: its ``report.json``.
    """

    def __init__(self, run: str, before: Mapping[str, Any]) -> None:
        self._run = run
        self._before = before

    @hookimpl
    def healthcheck_report_section(self, session: Session, report: dict[str, Any]) -> None:
        found = compare(self._before, report)
        report["against"] = {"run": self._run, **found}
        for line in _lines(self._run, found, session.unit):
            session.note(line)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """``gone``, ``still``, ``unproven`` (with the reason) and ``new``: a cause of a rule each, with the step of its first alert."""
    old, new = _first_steps(before), _first_steps(now)
    found: dict[str, list[dict[str, Any]]] = {"gone": [], "still": [], "unproven": [], "new": []}
    for name, fired in old.items():
        rule, _, cause = name.partition(".")
        entry = {"rule": rule, "cause": cause, "step": fired}
        if name in new:
            found["still"].append({**entry, "now": new[name]})
            continue
        reason = _unproven(now, rule, cause, fired)
        found["unproven" if reason else "gone"].append({**entry, **({"reason": reason} if reason else {})})
    found["new"] = [
        {"rule": name.partition(".")[0], "cause": name.partition(".")[2], "step": fired}
        for name, fired in new.items()
        if name not in old
    ]
    return found


def _first_steps(report: Mapping[str, Any]) -> dict[str, int]:
    """``rule.cause`` (or the rule) -> step of its first alert."""
    first: dict[str, int] = {}
    for alert in report.get("alerts", ()):
        name = f"{alert['rule']}.{alert['cause']}" if alert.get("cause") else str(alert["rule"])
        first.setdefault(name, int(alert.get("fired_step", 0)))
    return first


def _unproven(now: Mapping[str, Any], rule: str, cause: str, fired: int) -> str:
    """Why silence proves nothing here; empty where it does."""
    entry = now.get("rules", {}).get(rule)
    if entry is None:
        return "the rule is not among those of this run"
    judged = (entry.get("causes") or {}).get(cause, entry) if cause else entry
    if judged.get("verdict") not in JUDGED:
        return f"it was not judged: {judged.get('reason') or entry.get('reason') or 'no data'}"
    reached = int(now.get("steps", 0))
    return f"this run ended at step {reached:,}, before step {fired:,}" if reached < fired else ""


def _lines(run: str, found: Mapping[str, list[dict[str, Any]]], unit: str) -> Iterator[str]:
    words = {
        "gone": "gone, and judged",
        "still": "still there",
        "unproven": "silent, which proves nothing",
        "new": "new",
    }
    if not any(found.values()):
        yield f"against {run}: neither run has an alert"
    for kind, said in words.items():
        if found[kind]:
            named = [
                f"{one['rule']}{': ' + one['cause'] if one['cause'] else ''} (step {step(one['step'])})"
                + (f": {one['reason']}" if "reason" in one else "")
                for one in found[kind][:SHOWN]
            ]
            more = f" and {len(found[kind]) - SHOWN} more" if len(found[kind]) > SHOWN else ""
            yield f"against {run}: {said}: {', '.join(named)}{more}"
