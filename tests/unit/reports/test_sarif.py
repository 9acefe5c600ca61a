"""SARIF for code scanning: results at the rule's place, suppressed where muted, the same from run to run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.reports.ci import sarif

RULES = """\
version: 1
external: [loss, norm]
rules:
  high: {metric: norm, when: {above: 5}, severity: warning}
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, hint: the batch, explains: [high]}
  quiet: {metric: norm, when: {above: 8}, severity: info}
"""


@pytest.fixture
def report(runs: Path, sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("team.yaml").write_text(RULES)
    made: dict[str, Any] = sessions.run(
        series={"norm": [1.0, 9.0], "loss": [1.0, math.nan]}, rules="team.yaml", console=False, mute=["quiet"]
    )
    return made


def test_a_result_lies_at_its_rule_and_what_is_explained_is_left_out(report: dict[str, Any]) -> None:
    (run,) = json.loads(sarif([report]))["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    results = {result["ruleId"]: result for result in run["results"]}
    assert set(results) == {"loss-not-finite", "quiet"}
    found = results["loss-not-finite"]
    assert found["level"] == "error"
    assert found["message"]["text"].endswith("\ntry: the batch")
    assert rules[found["ruleIndex"]] == "loss-not-finite"
    (location,) = found["locations"]
    assert location["physicalLocation"] == {"artifactLocation": {"uri": "team.yaml"}, "region": {"startLine": 5}}
    assert found["properties"] == {"step": 2, "value": "nan", "limit": "non-finite"}
    assert run["invocations"][0]["exitCode"] == report["exit_code"]


def test_what_is_muted_is_suppressed_and_not_lost(report: dict[str, Any]) -> None:
    results = {r["ruleId"]: r for r in json.loads(sarif([report]))["runs"][0]["results"]}
    assert results["quiet"]["level"] == "note"
    assert results["quiet"]["suppressions"][0]["kind"] == "external"
    assert "suppressions" not in results["loss-not-finite"]


def test_a_rule_of_a_pack_lies_at_the_script_and_keeps_its_fingerprint(report: dict[str, Any]) -> None:
    report["rules"]["loss-not-finite"]["origin"] = "healthcheck:core:7"
    Path("train.py").write_text("")
    report["target"] = "train.py"
    first = json.loads(sarif([report]))["runs"][0]["results"]
    report["alerts"][0]["fired_step"] = 90
    again = json.loads(sarif([report]))["runs"][0]["results"]
    prints = [[r["partialFingerprints"] for r in results] for results in (first, again)]
    assert prints[0] == prints[1]
    places = {r["ruleId"]: r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in first}
    assert places["loss-not-finite"] == "train.py"
