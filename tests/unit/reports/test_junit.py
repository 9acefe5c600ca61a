"""JUnit XML: a case per rule, in the form that CI servers accept."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.reports.ci import junit_xml
from healthcheck.reports.wording import place

NAN = math.nan


@pytest.fixture(scope="module")
def xunit(helper: Callable[[str], ModuleType]) -> ModuleType:
    return helper("tests/unit/reports/xunit.py")


@pytest.fixture
def document(runs: Path, sessions: ModuleType, xunit: ModuleType) -> Callable[..., dict[str, ET.Element]]:
    """``document(series=..., settings=...)``: the cases of one session by name, from a valid document."""

    def make(**spec: Any) -> dict[str, ET.Element]:
        text = junit_xml([sessions.run(console=False, **spec)])
        assert xunit.mistakes(text) == []
        [suite] = ET.fromstring(text)
        for attribute, child in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == len(suite.findall(f"testcase/{child}"))
        cases = suite.findall("testcase")
        assert int(suite.attrib["tests"]) == len(cases)
        return {case.attrib["name"]: case for case in cases}

    return make


SPIKE = [1.0 + 0.01 * (i % 7) for i in range(40)] + [90.0, 91.0] + [1.0] * 5


def test_a_failed_rule_is_a_failure_with_its_place_value_and_hint(document: Callable[..., Any], tmp_path: Path) -> None:
    rules = tmp_path / "team.yaml"
    rules.write_text(
        "version: 1\nrules:\n  loss-not-finite:\n    metric: loss\n    when: nonfinite\n    severity: error\n"
        "    hint: look at the batch\n"
    )
    cases = document(series={"loss": [1.0, NAN]}, rules=str(rules))
    [failure] = cases["loss-not-finite"].findall("failure")
    assert failure.attrib["type"] == "error"
    assert "loss-not-finite at step 2" in failure.attrib["message"]
    assert failure.text is not None
    assert f"{rules.name}:3" in failure.text.splitlines()[0]
    assert "value: nan" in failure.text
    assert "try: look at the batch" in failure.text


def test_an_alert_below_fail_on_passes_and_is_told_in_system_out(document: Callable[..., Any]) -> None:
    case = document(series={"loss": SPIKE})["loss-spike"]
    assert case.find("failure") is None
    assert "warning: loss-spike at step 42" in case.findtext("system-out", "")


def test_with_fail_on_warning_the_same_alert_is_a_failure(document: Callable[..., Any]) -> None:
    case = document(series={"loss": SPIKE}, settings={"fail_on": "warning"})["loss-spike"]
    assert case.find("failure") is not None


def test_not_judged_is_skipped_with_its_reason_and_never_passes(document: Callable[..., Any]) -> None:
    case = document(series={"loss": [1.0] * 5})["other-missing"]
    skipped = case.find("skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "nothing logged other"
    assert "try: log other" in (skipped.text or "")


def test_what_does_not_apply_is_no_case_but_is_listed_with_its_reason(
    runs: Path, sessions: ModuleType, xunit: ModuleType
) -> None:
    text = junit_xml([sessions.run(series={"loss": [1.0] * 5}, rules="healthcheck:core", console=False)])
    assert xunit.mistakes(text) == []
    [suite] = ET.fromstring(text)
    assert "updates-skipped" not in {case.attrib["name"] for case in suite.findall("testcase")}
    assert "does not apply: updates-skipped" in suite.findtext("system-out", "")


def test_the_suite_carries_the_verdict_of_the_run(runs: Path, sessions: ModuleType) -> None:
    [suite] = ET.fromstring(junit_xml([sessions.run(series={"loss": SPIKE}, console=False)]))
    found = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert found == {"verdict": "WARNED 1", "judged": "2 of 4 checks that apply were judged; log norm; log other"}


def test_a_required_rule_without_data_is_a_failure(document: Callable[..., Any]) -> None:
    rules = {
        "version": 1,
        "external": ["other"],
        "rules": {"must": {"metric": "other", "when": {"above": 1}, "required": True}},
    }
    failure = document(series={"loss": [1.0]}, rules=rules)["must"].find("failure")
    assert failure is not None
    assert "required but not judged" in failure.attrib["message"]


def test_a_muted_alert_passes_and_says_why(document: Callable[..., Any]) -> None:
    case = document(series={"loss": SPIKE}, settings={"fail_on": "warning"}, mute=["loss-spike@1..99"])["loss-spike"]
    assert case.find("failure") is None
    assert "muted:" in case.findtext("system-out", "")


def test_a_run_that_judged_nothing_is_an_error_of_its_own(document: Callable[..., Any]) -> None:
    cases = document(
        series={"unknown": [1.0]},
        rules={"version": 1, "external": ["x"], "rules": {"a": {"metric": "x", "when": {"above": 1}}}},
    )
    assert cases["the run itself"].find("error") is not None


def test_text_that_xml_cannot_hold_is_escaped(xunit: ModuleType, sessions: ModuleType, runs: Path) -> None:
    report = sessions.run(series={"loss": [1.0, NAN]}, console=False)
    report["alerts"][0]["message"] = "bell \x07 and <tag> & \ud800"
    text = junit_xml([report])
    assert xunit.mistakes(text) == []
    assert r"bell \x07 and &lt;tag&gt; &amp; \ud800" in text


def test_several_reports_are_several_suites(xunit: ModuleType, sessions: ModuleType, runs: Path) -> None:
    reports = [
        sessions.run(series={"loss": values}, console=False, target=name)
        for name, values in (("a", [1.0]), ("b", [NAN]))
    ]
    text = junit_xml(reports)
    assert xunit.mistakes(text) == []
    root = ET.fromstring(text)
    assert [(suite.attrib["name"], suite.attrib["failures"]) for suite in root] == [("a", "0"), ("b", "1")]
    assert root.attrib["failures"] == "1"


def test_the_checker_itself_sees_mistakes(xunit: ModuleType) -> None:
    """A validator that accepts everything would prove nothing."""
    bad = '<testsuites><testsuite name="a" tests="1" failures="0" time="x"><testcase file="f"><b/></testcase></testsuite></testsuites>'
    found = " ".join(xunit.mistakes(bad))
    for part in ("errors is missing", "time='x'", "no attribute file", "name is missing", "b is not allowed"):
        assert part in found


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("team.yaml:14", ("team.yaml", 14)),
        ("healthcheck:recommended:10", ("", 0)),
        ("rules", ("rules", 0)),
        ("", ("", 0)),
    ],
)
def test_only_files_have_a_place(origin: str, expected: tuple[str, int]) -> None:
    assert place(origin) == expected


CAUSES = """\
version: 1
external: [a, b, c]
rules:
  part:
    causes:
      orphan: {kind: fact, metric: a, when: {above: 0}, severity: error, message: nobody optimises it}
      frozen: {kind: trend, metric: b, when: {above: 0}, message: it never moves}
      left-out: {kind: trend, metric: c, when: {above: 0}}
"""


def test_each_cause_is_a_case_of_its_own(document: Callable[..., Any], tmp_path: Path) -> None:
    rules = tmp_path / "team.yaml"
    rules.write_text(CAUSES)
    cases = document(series={"a": [0.0, 0.0, 1.0], "b": [0.0, 1.0, 1.0]}, rules=str(rules))
    assert set(cases) == {"part.orphan", "part.frozen", "part.left-out"}
    assert "nobody optimises it" in cases["part.orphan"].find("failure").attrib["message"]
    assert cases["part.frozen"].find("failure") is None
    assert "part.frozen at step 2: it never moves" in cases["part.frozen"].find("system-out").text
    assert cases["part.left-out"].find("skipped") is not None
