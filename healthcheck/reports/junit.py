"""JUnit XML from the content of ``report.json``: the test tab of every CI.

One suite is the run, one case is a rule. A failed rule at or above ``fail_on`` is a ``failure``;
below it the case passes and carries its text in ``system-out`` (JUnit has no warning, and mapping
warnings to failures or skips surprises people). Not judged is ``skipped`` with its reason; a broken
action or plugin is an ``error``. Valid for the Jenkins xUnit schema, whose ``file`` and ``line``
attributes name the place of the rule.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.verdicts import Severity

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; messages may come from anywhere."""


def junit_xml(reports: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """The document for one report or several, one suite each."""
    listed = [reports] if isinstance(reports, Mapping) else list(reports)
    root = ET.Element("testsuites", name="healthcheck")
    for report in listed:
        root.append(_suite(report))
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(report: Mapping[str, Any]) -> ET.Element:
    name = _text(report.get("path") or report.get("target") or "run")
    suite = ET.Element("testsuite", name=name)
    level = _level(report)
    counts = {"failure": 0, "error": 0, "skipped": 0}
    cases = [_case(name, rule, entry, _alerts_of(report, rule), level) for rule, entry in report["rules"].items()]
    cases += [
        _broken(name, f"action {e['action']}", f"{e['rule']}, step {e['step']}: {e['error']}")
        for e in report["action_errors"]
    ]
    cases += [_broken(name, f"plugin {e['plugin']}", f"{e['hook']}: {e['error']}") for e in report["plugin_errors"]]
    cases += [_broken(name, "healthcheck", e["error"]) for e in report.get("internal_errors", ())]
    if report["exit_reason"] in ("script_error", "interrupted", "nothing_judged"):
        cases.append(_broken(name, "the run itself", str(report["exit_words"])))
    for case in cases:
        suite.append(case)
        for kind in counts:
            counts[kind] += case.find(kind) is not None
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.set("time", f"{float(report['seconds']):.3f}")
    return suite


def _case(
    suite: str, rule: str, entry: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]], level: float
) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(rule), time="0")
    file, line = place(entry.get("origin", ""))
    if file:
        case.set("file", _text(file))
    if line:
        case.set("line", str(line))
    counted = [a for a in alerts if not a.get("muted") and not a.get("accepted")]
    failing = [a for a in counted if Severity.parse(a["severity"]) >= level]
    without = entry["verdict"] == "not judged"
    if failing:
        failure = ET.SubElement(
            case, "failure", message=_text(headline(failing[0])), type=_text(str(failing[0]["severity"]))
        )
        failure.text = _text("\n".join(map(story, failing)))
    elif without and entry.get("required"):
        ET.SubElement(
            case, "failure", message=_text(f"required but not judged: {entry.get('reason', '')}"), type="error"
        )
    elif without:
        ET.SubElement(case, "skipped", message=_text(str(entry.get("reason", "not judged"))))
    rest = [a for a in alerts if a not in failing]
    if rest:
        ET.SubElement(case, "system-out").text = _text("\n".join(map(story, rest)))
    return case


def _broken(suite: str, name: str, text: str) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(name), time="0")
    ET.SubElement(case, "error", message=_text(text), type="error")
    return case


def _alerts_of(report: Mapping[str, Any], rule: str) -> list[Mapping[str, Any]]:
    return [alert for alert in report["alerts"] if alert["rule"] == rule]


def _level(report: Mapping[str, Any]) -> float:
    fail_on = str(report.get("fail_on", "error"))
    return float("inf") if fail_on == "never" else Severity.parse(fail_on)


def place(origin: str) -> tuple[str, int]:
    """``team.yaml:14`` -> ``("team.yaml", 14)``; a pack name has no line."""
    file, _, line = origin.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (origin, 0)


def headline(alert: Mapping[str, Any]) -> str:
    """``loss-not-finite at step 131: loss is nan``."""
    return f"{alert['rule']} at step {alert['fired_step']:,}: {alert.get('message', '')}"


def story(alert: Mapping[str, Any]) -> str:
    """All that a person needs of one alert, as text."""
    lines = [f"{alert['severity']}: {headline(alert)}"]
    if "normal" in alert:
        lines.append(f"  normal: {alert['normal']}, limit: {alert['threshold']}")
    lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    done = [f"{o['action']}: {o['text']}" for o in alert.get("actions", ()) if o.get("text")]
    lines += [f"  {text}" for text in done]
    if alert.get("explained_by"):
        lines.append(f"  explained by {alert['explained_by']}")
    for word in ("muted", "accepted"):
        if alert.get(word):
            lines.append(f"  {word}: {alert[word]}")
    if alert.get("hint"):
        lines.append(f"  try: {alert['hint']}")
    return "\n".join(lines)


def by_severity(alerts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Most severe first, then in the order in which they fired."""
    return sorted(alerts, key=lambda a: -Severity.parse(a["severity"]))


def _text(text: str) -> str:
    return _ILLEGAL.sub("?", text)
