"""JUnit XML from the content of ``report.json``: the test tab of every CI.

One suite is the run, one case is a rule. A failed rule at or above ``fail_on`` is a ``failure``;
below it the case passes and carries its text in ``system-out`` (JUnit has no warning, and mapping
warnings to failures or skips surprises people). Not judged is ``skipped`` with its reason; a broken
action or plugin is an ``error``. Valid for the Jenkins xUnit schema (tests/unit/reports/xunit.xsd),
which has no attributes for a case's place: the rule's file and line stand in the case's text.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.reports.alerttext import excused, fails_from, headline, story
from healthcheck.verdicts import Severity

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; messages may come from anywhere."""

_BROKEN_ENDS = ("script_error", "interrupted", "nothing_judged", "monitor_error")


def junit_xml(reports: Sequence[Mapping[str, Any]]) -> str:
    """The document: one suite per report."""
    root = ET.Element("testsuites", name="healthcheck")
    totals = {"tests": 0, "failures": 0, "errors": 0}
    for report in reports:
        suite = _suite(report)
        root.append(suite)
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
    for key, total in totals.items():
        root.set(key, str(total))
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(report: Mapping[str, Any]) -> ET.Element:
    name = _text(str(report.get("path") or report.get("target") or "run"))
    level = fails_from(report)
    cases = [_case(name, rule, entry, _alerts_of(report, rule), level) for rule, entry in report["rules"].items()]
    cases += [
        _broken(name, f"action {e['action']}", f"{e['rule']}, step {e['step']}: {e['error']}")
        for e in report.get("action_errors", ())
    ]
    cases += [
        _broken(name, f"plugin {e['plugin']}", f"{e['hook']}: {e['error']}") for e in report.get("plugin_errors", ())
    ]
    cases += [_broken(name, "healthcheck", str(e["error"])) for e in report.get("internal_errors", ())]
    if report["exit_reason"] in _BROKEN_ENDS:
        cases.append(_broken(name, "the run itself", str(report["exit_words"])))
    suite = ET.Element("testsuite", name=name, tests=str(len(cases)))
    for attribute, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(child) is not None for case in cases)))
    suite.set("time", f"{float(report['seconds']):.3f}")
    suite.extend(cases)
    return suite


def _case(
    suite: str, rule: str, entry: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]], level: float
) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(rule), time="0")
    origin = f"rule: {entry.get('origin') or 'unknown place'}"
    failing = [a for a in alerts if not excused(a) and Severity.parse(a["severity"]) >= level]
    without = entry["verdict"] == "not judged"
    reason = str(entry.get("reason") or "not judged")
    if failing:
        failure = ET.SubElement(
            case, "failure", message=_text(headline(failing[0])), type=_text(str(failing[0]["severity"]))
        )
        failure.text = _text("\n".join([origin, *map(story, failing)]))
    elif without and entry.get("required"):
        failure = ET.SubElement(case, "failure", message=_text(f"required but not judged: {reason}"), type="error")
        failure.text = _text(origin)
    elif without:
        ET.SubElement(case, "skipped", message=_text(reason)).text = _text(origin)
    rest = [a for a in alerts if a not in failing]
    if rest or not (failing or without):
        ET.SubElement(case, "system-out").text = _text("\n".join([origin, *map(story, rest)]))
    return case


def _broken(suite: str, name: str, text: str) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(name), time="0")
    ET.SubElement(case, "error", message=_text(text), type="error")
    return case


def _alerts_of(report: Mapping[str, Any], rule: str) -> list[Mapping[str, Any]]:
    return [alert for alert in report["alerts"] if alert["rule"] == rule]


def _text(text: str) -> str:
    return _ILLEGAL.sub("?", text)
