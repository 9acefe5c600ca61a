"""Watched tests: the marker, options and ini keys, reports, references, faults on purpose, workers."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from watched_toy import TOY, block

RunTests = Callable[..., pytest.RunResult]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rulez='rules.yaml'", '*has no argument "rulez"; did you mean "rules"?*'),
        ("rules='gone.yaml'", "*gone.yaml*"),
        ("rules={'version': 1, 'rules': {'a': {'metric': 'los', 'when': {'above': 1}}}}", '*did you mean "loss"?*'),
        ("'rules.yaml'", "*takes keywords only*"),
        ("reference='final_los'", '*there is no measure "final_los"*'),
    ],
)
def test_a_mistake_in_the_marker_is_a_failure_that_says_what_to_write(
    watched: RunTests, arguments: str, said: str
) -> None:
    result = watched(f"@pytest.mark.healthcheck({arguments})\ndef test_it(): train(steps=3)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])
    result.stdout.no_fnmatch_line("*healthcheck/pytesting*")


def test_a_plugin_that_raises_fails_the_test_with_its_name_and_place(
    watched: RunTests, pytester: pytest.Pytester
) -> None:
    """Monitoring breaks quietly in training and loudly in tests."""
    pytester.makepyfile(
        broken="import healthcheck\n@healthcheck.hookimpl\ndef healthcheck_step_end(event):\n    raise RuntimeError('oh')\n"
    )
    result = watched(
        "@pytest.mark.healthcheck(rules='rules.yaml', plugins='broken.py')\ndef test_it(): train(steps=3)\n"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(['plugin "broken" raised in step_end at step 1: RuntimeError: oh', "  at *broken.py:4"])


@pytest.mark.slow
def test_options_and_ini_keys_stand_in_for_the_marker(watched: RunTests, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nhealthcheck_rules = rules.yaml\nhealthcheck_fail_on = never\n")
    tests = "@pytest.mark.healthcheck\ndef test_it(): train(lr=100.0)\n"
    # `never` lets alerts pass, but a stop that a rule asked for is never a pass.
    watched(tests).assert_outcomes(failed=1)
    watched(tests, "--healthcheck-rules", "rules.yaml", "--healthcheck-fail-on", "error").assert_outcomes(failed=1)
    pytester.makefile(".yaml", quiet="version: 1\nrules: {r: {metric: loss, when: nonfinite, severity: error}}")
    watched(tests, "--healthcheck-rules", "quiet.yaml").assert_outcomes(passed=1)
    watched(tests, "--healthcheck-rules", "quiet.yaml", "--healthcheck-fail-on", "error").assert_outcomes(failed=1)


@pytest.mark.slow
def test_reports_of_all_watched_tests_are_one_file(watched: RunTests, pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    watched(tests, "--healthcheck-report", "junit=hc.xml", "--healthcheck-report", "json=hc.json", "--junitxml=py.xml")
    suites = ET.parse(pytester.path / "hc.xml").getroot()
    assert [(suite.attrib["name"], suite.attrib["failures"]) for suite in suites] == [
        ("test_toy.py::test_train[0.1]", "0"),
        ("test_toy.py::test_train[100.0]", "2"),
    ]
    assert [r["verdict"] for r in json.loads((pytester.path / "hc.json").read_text())] == ["ok", "stopped"]
    properties = {p.attrib["name"]: p.attrib["value"] for p in ET.parse(pytester.path / "py.xml").iter("property")}
    assert properties["healthcheck_verdict"] in ("OK", "STOPPED")
    assert "healthcheck_alerts" in properties


def test_an_unknown_report_is_refused_before_anything_runs(watched: RunTests) -> None:
    result = watched("def test_it(): pass\n", "--healthcheck-report", "junt=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*there is no report "junt"; did you mean "junit"?*'])


@pytest.mark.slow
def test_the_last_failed_test_runs_again(watched: RunTests) -> None:
    tests = """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    watched(tests)
    watched(tests, "--lf").assert_outcomes(failed=1)


@pytest.mark.slow
def test_with_healthcheck_off_tests_run_unwatched(watched: RunTests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK", "off")
    watched("@pytest.mark.healthcheck(rules='rules.yaml')\ndef test_it(): train(lr=100.0)\n").assert_outcomes(passed=1)


@pytest.mark.slow
def test_an_injected_fault_fires_the_rule_and_is_reported(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml")
def test_broken(inject):
    inject("nan-grad@5")
    train()

def test_too_late(inject, healthcheck):
    inject("spike", at=900)
    train(steps=5)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    assert block(result, "grads-not-finite")[0] == "grads-not-finite at step 5: grad_norm is nan"
    result.stdout.fnmatch_lines(["injected nan-grad at step 5: *"])


@pytest.mark.slow
def test_a_reference_is_written_compared_and_kept_with_its_tolerance(
    watched: RunTests, pytester: pytest.Pytester
) -> None:
    tests = """
import os
@pytest.mark.healthcheck(rules="rules.yaml", reference="final_loss")
def test_it():
    train(steps=int(os.environ.get("STEPS", "40")))
"""
    missing = watched(tests)
    missing.stdout.fnmatch_lines(["test_toy.reference.yaml has no final_loss for test_it"])
    path = pytester.path / "test_toy.reference.yaml"
    watched(tests, "--healthcheck-update-reference").stdout.fnmatch_lines(
        ["reference written: test_toy.reference.yaml"]
    )
    watched(tests).assert_outcomes(passed=1)
    text = path.read_text()
    value = float(re.search(r"value: ([\d.e-]+)", text)[1])  # type: ignore[index]
    path.write_text(text.replace(f"value: {value}", f"value: {value / 2}\n      tolerance: 10%"))
    worse = watched(tests)
    worse.assert_outcomes(failed=1)
    worse.stdout.fnmatch_lines(["final_loss is *, reference *, above by more than 10%"])
    watched(tests, "--healthcheck-update-reference").assert_outcomes(passed=1)
    assert "tolerance: 10%" in path.read_text()


@pytest.mark.slow
def test_numbers_can_be_played_into_the_watch(watched: RunTests) -> None:
    result = watched(
        """
from healthcheck.testing import play

@pytest.mark.healthcheck(rules="rules.yaml")
def test_smoke(healthcheck):
    play(healthcheck, {"loss": "2.3 x10, nan"})
"""
    )
    result.assert_outcomes(failed=1)
    assert block(result, "loss-not-finite")[0] == "loss-not-finite at step 11: loss is nan"


@pytest.mark.slow
def test_two_workers_give_one_table_and_one_report(watched: RunTests, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        test_toy=TOY
        + """
@pytest.mark.healthcheck(rules="rules.yaml", reference="final_loss")
@pytest.mark.parametrize("lr", [0.1, 0.05, 100.0])
def test_train(lr):
    train(lr)
"""
    )
    options = ("-p", "healthcheck.pytesting.plugin", "-p", "xdist", "-n", "2", "--healthcheck-report", "junit=hc.xml")
    result = pytester.runpytest_subprocess(*options, "--healthcheck-update-reference")
    result.assert_outcomes(passed=2, failed=1)
    assert len(ET.parse(pytester.path / "hc.xml").getroot()) == 3
    assert block(result, "loss-not-finite")
    result.stdout.fnmatch_lines(["FAILED test_toy.py::test_train?100.0? - loss-not-finite at step *"])
    rows = [re.match(r"test_toy.py::test_train\[(.*)\] +(\w+) +\d+ steps", line) for line in result.outlines]
    assert sorted(row.groups() for row in rows if row) == [("0.05", "OK"), ("0.1", "OK"), ("100.0", "STOPPED")]
    assert (pytester.path / "test_toy.reference.yaml").read_text().count("final_loss") == 2
