"""Formats that CI systems read: GitHub annotations and summaries, JUnit XML, SARIF."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck.core.alerts import Severity
from healthcheck.core.digest import sha256
from healthcheck.core.text import step, visible, visible_lines
from healthcheck.core.version import VERSION
from healthcheck.reports.wording import (
    by_cause,
    by_severity,
    checks,
    excused,
    fails_from,
    headline,
    how_it_ended,
    judged_line,
    place,
    story,
    verdict_word,
)

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
    return lines + [f"::error title=healthcheck::{_message(how_it_ended(report))}" for report in silent]


def job_summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """The job summary: one table per run."""
    parts = []
    for report in reports:
        parts.append(f"### healthcheck: {_cell(str(report.get('path') or report.get('target', 'run')))}\n")
        parts.append(_cell(f"{how_it_ended(report)} exit {report['exit_code']}") + "\n")
        if report["alerts"]:
            parts.append("| | rule | step | what | try |\n|---|---|---|---|---|")
            parts += [_row(alert) for alert in by_severity(report["alerts"])]
            parts.append("")
        parts.append(_cell(judged_line(report["rules"])) + "\n")
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
    """Text from anywhere as one cell: no table, line, link, image or HTML of its own."""
    for sign, instead in _MARKUP:
        text = text.replace(sign, instead)
    return visible(text.replace("\r", " ").replace("\n", " "))


_MARKUP = (("\\", "\\\\"), ("&", "&amp;"), ("<", "&lt;"), *((sign, f"\\{sign}") for sign in "|[]`*_~"))
"""What Markdown would make something of, and what stands for it: GitHub would fetch an image for everybody who reads."""


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
    return visible_lines(text).replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


# --------------------------------------------------------------------------------------------------
# JUnit XML from the content of ``report.json``: the test tab of every CI.
#
# One suite is the run, one case is a cause, called ``rule.cause`` (or by its rule, where that is its own only cause). What
# does not apply to the run has no case. A failed cause at or above ``fail_on`` is a ``failure``;
# below it the case passes and carries its text in ``system-out`` (JUnit has no warning, and mapping
# warnings to failures or skips surprises people). What applies and was not judged is ``skipped`` with its
# reason; what does not apply is listed in the suite's ``system-out``. A broken action or plugin is an ``error``.
# The suite's property ``verdict`` is the word of every other output. Valid for the Jenkins xUnit schema (tests/unit/reports/xunit.xsd),
# which has no attributes for a case's place: the rule's file and line stand in the case's text.


_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold; messages may come from anywhere."""

_BROKEN_ENDS = ("script failed", "interrupted", "not judged", "internal error")


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
    cases = [
        _case(name, cause, entry, _alerts_of(report, cause), level)
        for cause, entry in checks(report["rules"])
        if entry["verdict"] != "does not apply"
    ]
    cases += [
        _broken(name, f"action {e['action']}", f"{e['rule']}, step {e['step']}: {e['error']}")
        for e in report.get("action_errors", ())
    ]
    cases += [
        _broken(name, f"plugin {e['plugin']}", f"{e['hook']}: {e['error']}")
        for e in report.get("plugin_errors", ())
        if e.get("raised", True)
    ]
    cases += [_broken(name, "healthcheck", str(e["error"])) for e in report.get("internal_errors", ())]
    if report["verdict"] in _BROKEN_ENDS and report["exit_code"]:
        cases.append(_broken(name, "the run itself", str(report["exit_words"])))
    suite = ET.Element("testsuite", name=name, tests=str(len(cases)))
    for attribute, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(child) is not None for case in cases)))
    suite.set("time", f"{float(report['seconds']):.3f}")
    properties = ET.SubElement(suite, "properties")
    for key, value in (("verdict", verdict_word(report)), ("judged", judged_line(report["rules"]))):
        ET.SubElement(properties, "property", name=key, value=_text(value))
    suite.extend(cases)
    outside = [
        f"{check}: {entry.get('reason', '')}"
        for check, entry in checks(report["rules"])
        if entry["verdict"] == "does not apply"
    ]
    lines = [f"healthcheck: {how_it_ended(report)}  exit {report['exit_code']}"]
    ET.SubElement(suite, "system-out").text = _text("\n".join([*lines, *(f"does not apply: {x}" for x in outside)]))
    return suite


def _case(
    suite: str, cause: str, entry: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]], level: float
) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(cause), time="0")
    origin = f"rule: {entry.get('origin') or 'unknown place'}"
    failing = [a for a in alerts if not excused(a) and Severity.parse(a["severity"]) >= level]
    without = entry["verdict"] == "not judged"
    reason = str(entry.get("reason") or "not judged")
    remedy = f"\ntry: {entry['remedy']}" if entry.get("remedy") else ""
    if failing:
        failure = ET.SubElement(
            case, "failure", message=_text(headline(failing[0])), type=_text(str(failing[0]["severity"]))
        )
        failure.text = _text("\n".join([origin, *map(story, failing)]))
    elif without and entry.get("required"):
        failure = ET.SubElement(case, "failure", message=_text(f"required but not judged: {reason}"), type="error")
        failure.text = _text(origin)
    elif without:
        ET.SubElement(case, "skipped", message=_text(reason)).text = _text(origin + remedy)
    rest = [a for a in alerts if a not in failing]
    if rest or not (failing or without):
        ET.SubElement(case, "system-out").text = _text("\n".join([origin, *map(story, rest)]))
    return case


def _broken(suite: str, name: str, text: str) -> ET.Element:
    case = ET.Element("testcase", classname=suite, name=_text(name), time="0")
    ET.SubElement(case, "error", message=_text(text), type="error")
    return case


def _alerts_of(report: Mapping[str, Any], cause: str) -> list[Mapping[str, Any]]:
    return [part for alert in report["alerts"] for part in by_cause(alert) if part["rule"] == cause]


def _text(text: str) -> str:
    return _ILLEGAL.sub("?", visible_lines(text))


# --------------------------------------------------------------------------------------------------
# SARIF 2.1.0 from the content of ``report.json``: for code scanning, which tracks results from run to run.
#
# One ``run`` per report, one result per alert that tells a story of its own: what another alert explains is left
# out, what is muted or accepted is a suppressed result with its reason. A result lies at its rule's file and
# line; a rule of a pack has none in the checkout, so its results lie at the script.


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVEL = {"error": "error", "warning": "warning", "info": "note"}


def sarif(reports: Sequence[Mapping[str, Any]]) -> str:
    """The document: one run per report."""
    content = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(report) for report in reports]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _run(report: Mapping[str, Any]) -> dict[str, Any]:
    ids = list(report["rules"])
    alerts = [alert for alert in report["alerts"] if not alert.get("explained_by")]
    return {
        "tool": {
            "driver": {
                "name": "healthcheck",
                "version": VERSION,
                "rules": [_rule(rule, entry, alerts) for rule, entry in report["rules"].items()],
            }
        },
        "invocations": [
            {
                "executionSuccessful": report["verdict"] not in ("internal error", "script failed"),
                "exitCode": report["exit_code"],
                "exitCodeDescription": how_it_ended(report),
            }
        ],
        "results": [_result(report, alert, ids) for alert in alerts],
    }


def _rule(rule: str, entry: Mapping[str, Any], alerts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": rule,
        "defaultConfiguration": {"level": _LEVEL.get(str(entry.get("severity")), "warning")},
    }
    hint = next((str(alert["hint"]) for alert in alerts if alert["rule"] == rule and alert.get("hint")), "")
    if hint:
        found["help"] = {"text": f"try: {hint}"}
    return found


def _result(report: Mapping[str, Any], alert: Mapping[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    rule = str(alert["rule"])
    text = headline(alert) + (f"\ntry: {alert['hint']}" if alert.get("hint") else "")
    result: dict[str, Any] = {
        "ruleId": rule,
        "level": _LEVEL[str(alert["severity"])],
        "message": {"text": text},
        "locations": [_location(report, rule)],
        "partialFingerprints": {"healthcheck/v1": _fingerprint(str(report.get("target", "")), rule)},
        "properties": {"step": alert["fired_step"], "value": alert["value"], "limit": alert["threshold"]},
    }
    if rule in ids:
        result["ruleIndex"] = ids.index(rule)
    if excused(alert):
        reason = str(alert.get("muted") or alert.get("accepted"))
        result["suppressions"] = [{"kind": "external", "justification": reason}]
    return result


def _location(report: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Code scanning wants one of every result: the rule, else the script, else whatever was judged."""
    file, line = place(str(report["rules"].get(rule, {}).get("origin", "")))
    if not line:
        names = [str(report[key]) for key in ("target", "path") if report.get(key)]
        file, line = next((name for name in names if Path(name).is_file()), names[-1] if names else "run"), 1
    uri = in_checkout(file, Path.cwd()).replace("\\", "/")
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}}


def _fingerprint(target: str, rule: str) -> str:
    """The same alert of the same script in two runs is one result; the step may move."""
    return sha256(f"{target}\0{rule}".encode()).hexdigest()[:32]
