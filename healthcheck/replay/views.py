"""Replayed runs as people read them: a table of many, a timeline of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.text import duration, number, plural, shorten, step
from healthcheck.reports.tables import table_lines
from healthcheck.reports.wording import how_it_ended, judged_line, unjudged, verdict_word

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
                verdict_word(report),
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
    return str(report["exit_words"]) if report["verdict"] == "not judged" else "-"


def _short(path: str) -> str:
    return path if len(path) <= NAME_WIDTH else "..." + path[-(NAME_WIDTH - 3) :]


# --------------------------------------------------------------------------------------------------
# The timeline of one replayed run, as text.


LABEL = {"error": "ERROR", "warning": "WARN", "info": "INFO"}
_ABSENT = "the record has no "
SHOWN_PER_RULE = 3
"""Episodes of one rule that are shown one by one; the rest is counted."""


def timeline(report: Mapping[str, Any], *, quiet: bool = False) -> list[str]:
    """All lines of one run: what was read, each alert with its step, what was not judged, the end."""
    lines = [headline(report)]
    if not quiet:
        lines += alert_lines(report)
        lines += _not_judged(report)
        lines += [f"  note: {note}" for note in notes(report)]
        lines.append(f"  {judged_line(report['rules'])}")
    return lines


def headline(report: Mapping[str, Any]) -> str:
    record = report["record"]
    span = f"steps {step(record['first_step'])} to {step(record['last_step'])}" if record["rows"] else "nothing in it"
    took = f" in {duration(report['seconds'])}" if report["seconds"] else ""
    names = shorten(record["metrics"], 6)
    return f"{report['path']}: {record['format']}, {plural(record['rows'], 'row')}, {span}{took}; {names}".rstrip("; ")


def alert_lines(report: Mapping[str, Any]) -> list[str]:
    """One line per episode, in the order in which they began."""
    shown: Counter[str] = Counter()
    rows: list[list[str]] = []
    for alert in report["alerts"]:
        rule = alert["rule"]
        shown[rule] += 1
        if shown[rule] > SHOWN_PER_RULE:
            continue
        rows.append([LABEL[alert["severity"]], rule, f"step {step(alert['fired_step'])}", alert_text(alert)])
    lines = table_lines(rows)
    more = {rule: n - SHOWN_PER_RULE for rule, n in shown.items() if n > SHOWN_PER_RULE}
    lines += [f"  {rule}: {plural(n, 'further episode')}" for rule, n in more.items()]
    stop = report.get("stop")
    if stop:
        lines.append(f"  a live run would have been stopped at step {step(stop['step'])} by {stop['rule']}")
    return lines


def alert_text(alert: Mapping[str, Any]) -> str:
    """The message of an alert, when it cleared, and why it does not count."""
    text = str(alert.get("message") or f"value {number(float(alert['value']))}")
    after = []
    if alert.get("cleared_step") is not None:
        after.append(f"cleared at {step(alert['cleared_step'])}")
    if alert.get("explained_by"):
        after.append(f"explained by {alert['explained_by']}")
    if alert.get("muted"):
        after.append(f"muted: {alert['muted']}")
    if alert.get("facts", {}).get("capped"):
        after.append(f"a note only: {alert['facts']['capped']}")
    return f"{text} ({'; '.join(after)})" if after else text


def notes(report: Mapping[str, Any]) -> list[str]:
    record = report["record"]
    found = list(record["notes"])
    if record.get("problem"):
        found.append(record["problem"])
    found += [f"internal error at step {step(e['step'])}: {e['error']}" for e in report["internal_errors"]]
    unused = [str(m["rule"]) for m in report["mutes"] if not m["hits"]]
    if unused:
        found.append(f"mutes that matched nothing: {shorten(unused)}")
    return found


def _not_judged(report: Mapping[str, Any]) -> list[str]:
    """Checks that apply and have no verdict, by reason; metrics that the record lacks are one reason."""
    silent: dict[str, list[str]] = {}
    absent: dict[str, None] = {}
    for name, entry in unjudged(report["rules"]):
        reason = str(entry.get("reason", ""))
        if reason.startswith(_ABSENT):
            absent[reason.removeprefix(_ABSENT)] = None
        else:
            silent.setdefault("the run is too short" if entry.get("needs_steps") else reason, []).append(name)
    lines = [f"  not judged  {shorten(names, 4)}: {reason}" for reason, names in silent.items()]
    return [*lines, f"  the record has no {shorten(list(absent), 8)}"] if absent else lines


def ending(report: Mapping[str, Any]) -> str:
    """The closing line's words for one run."""
    return how_it_ended(report)
