"""GitHub annotations at the rule's place, and the job summary."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.reports.ci import job_summary, workflow_commands

NAN = math.nan
RULES = """\
version: 1
external: [loss, norm]
rules:
  high:
    metric: norm
    when: {above: 5}
    severity: warning
    message: "norm, is {value}"
  loss-not-finite:
    metric: loss
    when: nonfinite
    severity: error
    hint: 100% the batch
"""


@pytest.fixture
def report(runs: Path, sessions: ModuleType, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "team.yaml").write_text(RULES)
    made: dict[str, Any] = sessions.run(
        series={"norm": [9.0, 9.0], "loss": [1.0, NAN]}, rules="sub/team.yaml", console=False
    )
    return made


def test_annotations_stand_at_the_rule_and_the_severe_come_first(report: dict[str, Any], tmp_path: Path) -> None:
    first, second = workflow_commands([report], tmp_path)
    assert first.startswith(
        "::error file=sub/team.yaml,line=9,title=healthcheck loss-not-finite::loss-not-finite at step 2"
    )
    assert first.endswith("%0Atry: 100%25 the batch")
    assert second == "::warning file=sub/team.yaml,line=4,title=healthcheck high::high at step 1: norm, is 9"


def test_the_path_is_that_in_the_checkout(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with `working-directory: sub` must still point into the repository."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    report["rules"]["high"]["origin"] = "team.yaml:4"
    assert "file=sub/team.yaml,line=4," in workflow_commands([report], tmp_path / "sub")[1]


def test_a_pack_is_no_file_of_the_checkout(report: dict[str, Any], tmp_path: Path) -> None:
    report["rules"]["high"]["origin"] = "healthcheck:recommended:12"
    assert workflow_commands([report], tmp_path)[1].startswith("::warning title=")


def test_at_most_ten_of_a_kind_are_shown_and_the_summary_has_all(report: dict[str, Any], tmp_path: Path) -> None:
    alert = report["alerts"][0]
    report["alerts"] = [{**alert, "fired_step": step} for step in range(1, 26)]
    assert len(workflow_commands([report], tmp_path)) == 10
    assert job_summary([report]).count("| warning |") == 25


def test_muted_and_explained_alerts_are_no_annotations(report: dict[str, Any], tmp_path: Path) -> None:
    report["alerts"][0]["muted"] = "known"
    report["alerts"][1]["explained_by"] = "other"
    assert workflow_commands([report], tmp_path) == []


def test_a_message_cannot_break_the_table(report: dict[str, Any]) -> None:
    report["alerts"][0]["message"] = "a | b\nc <script>"
    [row] = [line for line in job_summary([report]).splitlines() if "high" in line]
    assert "a \\| b c &lt;script>" in row


def test_a_run_that_judged_nothing_is_an_annotation_too(runs: Path, sessions: ModuleType, tmp_path: Path) -> None:
    rules = {"version": 1, "rules": {"a": {"metric": "lr", "when": {"above": 1}}}}
    report = sessions.run(series={"x": [1.0]}, rules=rules, console=False)
    [line] = workflow_commands([report], tmp_path)
    assert line.startswith("::error title=healthcheck::NOT JUDGED, no rule had data, 1 step")


def test_a_live_run_writes_commands_to_stderr_and_appends_its_summary(
    watched: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stdout belongs to the script; the summary file is shared by all steps of a job."""
    summary = tmp_path / "summary.md"
    summary.write_text("earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ended = watched(series={"loss": [1.0, NAN]}, reports={"github": ""})
    assert ended.stdout == ""
    assert "\n::error title=healthcheck loss-not-finite::" in ended.stderr
    assert summary.read_text().startswith("earlier step\n### healthcheck: train.py\n")
