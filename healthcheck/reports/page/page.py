"""One HTML file that tells a run, or several: how it ended, its alerts, its series, every rule.

The file needs nothing else: no script, no font, no picture, no connection (its own content policy forbids
them). It follows the reader's light or dark setting, fits a telephone and says every state in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from healthcheck.reports.alerttext import actions_done
from healthcheck.reports.console.closing import count_line, how_it_ended
from healthcheck.reports.page.charts import Line, chart
from healthcheck.reports.page.style import CSS
from healthcheck.reports.text import duration, number, plural, step
from healthcheck.samples import decode_number

MOST_ALERTS = 100
MOST_CHARTS = 12
_SHOWN = {"failed": "FAILED", "warned": "WARNED", "ok": "OK", "not judged": "NOT JUDGED"}
FEW = 8
"""Rules of one verdict that are shown without a click."""
_ORDER = ("failed", "warned", "not judged", "ok")


def page_html(reports: Sequence[Mapping[str, Any]], lines: Sequence[Line] = ()) -> str:
    """The whole document.

    :param reports: contents of ``report.json``; several (a replay, a test session) share one page.
    :param lines: the series of the run, where there is one run with a record.
    """
    names = [str(report.get("path") or report.get("target") or "run") for report in reports]
    title = f"healthcheck: {names[0]}" if len(names) == 1 else f"healthcheck: {plural(len(names), 'run')}"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title>",
        f"<style>{CSS}</style>",
        "<main>",
    ]
    if len(reports) != 1:
        parts += _contents(reports, names)
    for index, (name, report) in enumerate(zip(names, reports, strict=True)):
        parts += _run(name, report, f"r{index}-", lines if len(reports) == 1 else ())
    return "\n".join([*parts, "</main>", "</html>"]) + "\n"


def _contents(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    rows = [
        f'<tr><td><a href="#r{index}-top">{escape(name)}</a></td><td>{_badge(str(report["verdict"]))}</td>'
        f"<td class=n>{step(int(report['steps']))}</td><td class=n>{len(report['alerts']):,}</td></tr>"
        for index, (name, report) in enumerate(zip(names, reports, strict=True))
    ]
    head = "<tr><th>run</th><th>verdict</th><th class=n>steps</th><th class=n>alerts</th></tr>"
    return [f"<h1>{plural(len(reports), 'run')}</h1>", f"<div class=wide><table>{head}{''.join(rows)}</table></div>"]


def _run(name: str, report: Mapping[str, Any], prefix: str, lines: Sequence[Line]) -> list[str]:
    said = f"{how_it_ended(report)}; exit {report['exit_code']}"
    parts = [
        f'<header id="{prefix}top"><h1>{escape(name)} {_badge(str(report["verdict"]))}</h1>',
        f"<p class=said>{escape(said)}</p>",
        f"<p>{escape(count_line(report['rules']))}</p>",
        _facts(report),
        "</header>",
    ]
    if report["alerts"]:
        shown = report["alerts"][:MOST_ALERTS]
        told = [alert for alert in shown if not alert.get("explained_by")]
        rest = [alert for alert in shown if alert.get("explained_by")]
        parts.append(f"<h2>Alerts</h2>{''.join(_alert(alert, prefix) for alert in told)}")
        if rest:  # the same story again: at a click
            inner = "".join(_alert(alert, prefix) for alert in rest)
            parts.append(
                f"<details><summary>{plural(len(rest), 'alert')} explained by others</summary>{inner}</details>"
            )
        if len(report["alerts"]) > len(shown):
            parts.append(f"<p>{len(report['alerts']) - len(shown):,} more alerts: healthcheck report</p>")
    if lines:
        marks = {
            int(alert["fired_step"]): str(alert["rule"])
            for alert in reversed(report["alerts"])
            if not alert.get("explained_by")
        }
        wanted = {fact["name"] for alert in report["alerts"] for fact in alert["series"]}
        chosen = sorted(lines, key=lambda line: line.name not in wanted)[:MOST_CHARTS]
        charts = "".join(chart(line, marks) for line in chosen)
        note = f"<p>Dashed lines: alerts. {len(lines) - len(chosen):,} more series in the record.</p>"
        parts.append(f"<h2>Series</h2><div class=charts>{charts}</div>{note if len(lines) > len(chosen) else ''}")
    parts.append(f"<h2>Rules</h2>{_rules(report['rules'], prefix, report['alerts'])}")
    problems = [f"action {e['action']} for {e['rule']}: {e['error']}" for e in report.get("action_errors", ())]
    problems += [f"plugin {e['plugin']} in {e['hook']}: {e['error']}" for e in report.get("plugin_errors", ())]
    problems += [str(e["error"]) for e in report.get("internal_errors", ())]
    if problems:
        parts.append(f"<h2>Errors of the watching itself</h2><ul>{_items(problems)}</ul>")
    return parts


def _facts(report: Mapping[str, Any]) -> str:
    overhead = report.get("overhead") or {}
    good = report.get("last_good_checkpoint") or {}
    facts = {
        "rules": report.get("rules_source"),
        "profile": report.get("profile"),
        "mode": "observe: nothing is stopped or changed" if report.get("mode") == "observe" else "act",
        "trainer": report.get("trainer"),
        "ranks": report.get("world_size") if report.get("world_size", 1) > 1 else None,
        "resumed from": f"step {step(report['resumed_from'])}" if report.get("resumed_from") else None,
        "took": duration(float(report["seconds"])),
        "cost of watching": f"{overhead['fraction'] * 100:.1f} % of the time" if "fraction" in overhead else None,
        "last good checkpoint": f"step {step(good['step'])}: {good['path']}" if good.get("path") else None,
    }
    rows = "".join(f"<dt>{key}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items() if value)
    return f"<dl>{rows}</dl>"


def _alert(alert: Mapping[str, Any], prefix: str) -> str:
    severity = str(alert["severity"])
    until = f" to {step(alert['cleared_step'])}" if alert.get("cleared_step") is not None else ", not cleared"
    value = f"value {number(decode_number(alert['value']))}" if alert.get("value") is not None else ""
    normal = f"normal {number(decode_number(alert['normal']))}" if alert.get("normal") is not None else ""
    limit = f"limit {alert['threshold']}" if alert.get("threshold") else ""
    said = [f"{key.replace('_', ' ')}: {fact}" for key, fact in alert.get("facts", {}).items()]
    if int(alert.get("count", 1)) > 1:
        said.append(f"{alert['count']:,} series: {', '.join(fact['name'] for fact in alert['series'])}")
    said += [f"evidence: {outcome['path']}" for outcome in alert.get("actions", ()) if outcome.get("path")]
    said += [f"{words}: {alert[key]}" for key, words in _EXCUSES.items() if alert.get(key)]
    hint = f"<p class=try><b>try</b> {escape(str(alert['hint']))}</p>" if alert.get("hint") else ""
    return (
        f'<article class="{escape(severity)}" id="{prefix}{escape(str(alert["rule"]))}-{int(alert["number"])}">'
        f"<h3><span class=sev>{escape(severity.upper())}</span> {escape(str(alert['rule']))} "
        f"<small>step {step(alert['fired_step'])}{until}</small></h3>"
        f"<p>{escape(str(alert.get('message', '')))}</p>"
        f"<p class=numbers>{escape(', '.join(filter(None, (value, normal, limit))))}</p>"
        f"<p><b>done</b> {escape(actions_done(alert))}</p>"
        f"<ul>{_items(said)}</ul>{hint}</article>"
    )


_EXCUSES = {"explained_by": "explained by", "muted": "muted", "accepted": "accepted"}


def _rules(rules: Mapping[str, Mapping[str, Any]], prefix: str, alerts: Sequence[Mapping[str, Any]]) -> str:
    first = {str(alert["rule"]): int(alert["number"]) for alert in reversed(alerts)}
    groups: dict[str, list[str]] = {"": [], "not judged": [], "ok": []}
    for rule, entry in sorted(rules.items(), key=lambda item: _ORDER.index(str(item[1]["verdict"]))):
        closest = entry.get("closest") or {}
        near = f"{number(decode_number(closest['score']))} at step {step(closest['step'])}" if closest else ""
        name = escape(rule)
        if rule in first:
            name = f'<a href="#{prefix}{name}-{first[rule]}">{name}</a>'
        verdict = str(entry["verdict"])
        groups[verdict if verdict in groups and rule not in first else ""].append(
            f"<tr><td>{name}</td><td>{_badge(verdict)}</td><td>{escape(near)}</td>"
            f"<td>{escape(str(entry.get('reason') or entry.get('threshold') or ''))}</td>"
            f"<td>{escape(str(entry.get('origin', '')))}</td></tr>"
        )
    return "".join(_rule_table(group, rows) for group, rows in groups.items() if rows)


def _rule_table(group: str, rows: Sequence[str]) -> str:
    """What fired stands open; dozens of rules that are fine or had no data open at a click, without a script."""
    head = "<tr><th>rule</th><th>verdict</th><th>closest</th><th>limit, or why not judged</th><th>from</th></tr>"
    table = f"<div class=wide><table>{head}{''.join(rows)}</table></div>"
    if not group:
        return table
    state = " open" if len(rows) <= FEW else ""
    return f"<details{state}><summary>{len(rows)} {group}</summary>{table}</details>"


def _badge(verdict: str) -> str:
    return f'<span class="badge {escape(verdict.replace(" ", "-"))}">{_SHOWN.get(verdict, escape(verdict))}</span>'


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)
