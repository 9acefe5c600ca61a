"""SARIF 2.1.0 from the content of ``report.json``: for code scanning, which tracks results from run to run.

One ``run`` per report, one result per alert that tells a story of its own: what another alert explains is left
out, what is muted or accepted is a suppressed result with its reason. A result lies at its rule's file and
line; a rule of a pack has none in the checkout, so its results lie at the script.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from healthcheck import __version__
from healthcheck.reports.alerttext import excused, headline, place
from healthcheck.reports.ci.github import in_checkout

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
                "version": __version__,
                "rules": [_rule(rule, entry, alerts) for rule, entry in report["rules"].items()],
            }
        },
        "invocations": [
            {
                "executionSuccessful": report["exit_reason"] not in ("monitor_error", "script_error"),
                "exitCode": report["exit_code"],
                "exitCodeDescription": str(report["exit_words"]),
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
    return hashlib.sha256(f"{target}\0{rule}".encode()).hexdigest()[:32]
