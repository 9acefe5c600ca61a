"""``healthcheck test``: output, exit codes, and, as a real process, independence from the folder it runs in."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

RULES = "version: 1\nrules:\n  high: {metric: loss, when: {above: 5}}\n  broken: {metric: loss, when: nonfinite}\n"
HEAD = "healthcheck_tests: 1\nrules: [team.yaml]\ntests:\n"
GOOD = '  - {name: fires, series: {loss: "1, 9"}, expect: [{rule: high, fires: 2}]}\n'
BAD = '  - {name: surprise, series: {loss: "1, 9"}, expect: none}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "team.yaml").write_text(RULES, encoding="utf-8")
    return tmp_path


def write(folder: Path, name: str, tests: str) -> None:
    (folder / name).write_text(HEAD + tests, encoding="utf-8")


def test_passing_tests_exit_0_and_failing_ones_1(folder: Path, healthcheck_here: Run) -> None:
    write(folder, "a.hctest.yaml", GOOD)
    result = healthcheck_here("test")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    write(folder, "a.hctest.yaml", GOOD + BAD)
    result = healthcheck_here("test", "a.hctest.yaml")
    assert result.returncode == 1
    assert "high: fired at step 2, and no alert was expected" in result.stdout


def test_a_mistake_in_a_file_is_4_and_the_other_files_still_run(folder: Path, healthcheck_here: Run) -> None:
    write(folder, "a.hctest.yaml", GOOD)
    write(folder, "b.hctest.yaml", '  - {name: x, serie: {loss: "1"}, expect: none}\n')
    (folder / "c.yaml").write_text("version: 1\nrules:\n  r: {metric: los, when: {abov: 5}}\n", encoding="utf-8")
    (folder / "c.hctest.yaml").write_text(HEAD.replace("team", "c") + GOOD, encoding="utf-8")
    result = healthcheck_here("test")
    assert result.returncode == 4
    assert "1 passed" in result.stdout
    assert 'unknown key "serie"' in result.stdout
    assert "c.yaml:3" in result.stdout, "mistakes of the rule file itself are shown with their place"


def test_nothing_to_run_is_5(folder: Path, healthcheck_here: Run) -> None:
    result = healthcheck_here("test")
    assert result.returncode == 5
    assert "no rule tests" in result.stderr
    write(folder, "a.hctest.yaml", GOOD)
    result = healthcheck_here("test", "-k", "anything")
    assert result.returncode == 5
    assert "none of 1 rule test has a name that matches -k anything" in result.stderr


@pytest.mark.parametrize(
    ("path", "answer"), [("none.hctest.yaml", "there is no"), ("team.yaml", "healthcheck check team.yaml")]
)
def test_a_wrong_path_is_answered(folder: Path, healthcheck_here: Run, path: str, answer: str) -> None:
    result = healthcheck_here("test", path)
    assert result.returncode == 4
    assert answer in result.stderr


@pytest.mark.slow
def test_the_project_around_does_not_matter(folder: Path, healthcheck_command: Run) -> None:
    """Its pytest options, conftest, Python tests and packages are for its own tests."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n", encoding="utf-8")
    for name in ("conftest.py", "test_mine.py", "__init__.py"):
        (folder / name).write_text("raise SystemExit('imported')\n", encoding="utf-8")
    write(folder, "a.hctest.yaml", GOOD)
    result = healthcheck_command("test", "-v")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a.hctest.yaml::fires PASSED" in result.stdout


@pytest.mark.slow
def test_coverage_lists_what_is_not_tested_and_strict_fails_on_it(folder: Path, healthcheck_command: Run) -> None:
    write(folder, "a.hctest.yaml", GOOD)
    listed = healthcheck_command("test", "--coverage")
    assert listed.returncode == 0
    assert "high: no silent test" in listed.stdout
    assert "broken: no firing test" in listed.stdout
    assert healthcheck_command("test", "--coverage=strict").returncode == 1
    write(folder, "a.hctest.yaml", GOOD + '  - {name: nan, series: {loss: "1, nan"}, expect: [broken]}\n')
    assert healthcheck_command("test", "--coverage=strict").returncode == 0


@pytest.mark.slow
def test_coverage_keeps_rules_of_the_same_id_in_two_files_apart(folder: Path, healthcheck_command: Run) -> None:
    write(folder, "a.hctest.yaml", GOOD)
    (folder / "other.yaml").write_text(RULES, encoding="utf-8")
    (folder / "b.hctest.yaml").write_text(
        HEAD.replace("team", "other") + '  - {name: quiet, series: {loss: "1 x3"}, expect: none}\n', encoding="utf-8"
    )
    result = healthcheck_command("test", "--coverage")
    assert "high (team.yaml): no silent test" in result.stdout
    assert "high (other.yaml): no firing test" in result.stdout
    assert "0 of 4 rules" in result.stdout


@pytest.mark.slow
def test_each_of_the_nineteen_example_rules_has_a_firing_and_a_silent_test(
    repository: Path, healthcheck_command: Run
) -> None:
    result = healthcheck_command("test", repository / "tests" / "rules" / "nineteen.hctest.yaml", "--coverage=strict")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "19 of 19 rules have a firing and a silent test" in result.stdout


@pytest.mark.slow
def test_the_examples_of_the_documentation_pass(repository: Path, healthcheck_command: Run) -> None:
    result = healthcheck_command("test", repository / "tests" / "rules" / "stability.hctest.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed, 1 xfailed" in result.stdout
