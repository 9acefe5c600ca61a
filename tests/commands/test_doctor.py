"""``healthcheck doctor``: what is in the way, before a run finds it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli.doctor import cpu_quota, name_clashes

Run = Callable[..., Any]


def findings(done: Any) -> list[dict[str, str]]:
    return list(json.loads(done.stdout)["findings"])


@pytest.mark.slow
def test_a_healthy_environment_has_no_problems(healthcheck_command: Run) -> None:
    done = healthcheck_command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("healthcheck doctor: no problems\n")
    assert "may stop a run: loss-not-finite, grads-not-finite" in done.stdout


def test_a_local_file_of_our_name_is_noticed(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "healthcheck.py").write_text("print('container probe')")
    done = healthcheck_here("doctor", "--format", "json")
    (note,) = [f for f in findings(done) if f["topic"] == "name"]
    assert note["level"] == "note"
    assert "healthcheck.py" in note["text"]
    assert done.returncode == 0


def test_the_foreign_distribution_is_found_by_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install healthcheck`` gives another package of the same import name."""
    info = tmp_path / "site" / "healthcheck-1.3.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: healthcheck\nVersion: 1.3.3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (problem,) = [f for f in name_clashes(tmp_path) if f.level == "problem"]
    assert "pip uninstall healthcheck" in problem.advice


def test_a_plugin_that_fails_is_a_problem(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1/0")
    done = healthcheck_here("doctor", "-p", "broken.py", "--format", "json")
    assert done.returncode == 1
    assert any(f["level"] == "problem" and "ZeroDivisionError" in f["text"] for f in findings(done))


def test_a_rule_file_with_a_mistake_is_a_problem_with_its_line(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(
        "version: 1\nextends: [healthcheck:recommended]\nrules:\n  los-spike: off\n"
    )
    done = healthcheck_here("doctor", "--format", "json")
    assert done.returncode == 1
    (problem,) = [f for f in findings(done) if f["level"] == "problem"]
    assert "healthcheck.yaml:4" in problem["text"]


def test_a_run_folder_that_cannot_be_written_is_a_problem(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = healthcheck_here("doctor", "--format", "json", env={"HEALTHCHECK_RUNS": str(tmp_path / "file" / "runs")})
    assert done.returncode == 1
    (problem,) = [f for f in findings(done) if f["level"] == "problem"]
    assert problem["topic"] == "records"


@pytest.mark.parametrize(
    ("name", "content", "cores"),
    [("cpu.max", "150000 100000\n", 1.5), ("cpu.max", "max 100000\n", None), ("other", "", None)],
)
def test_the_processor_quota_of_a_container_is_read(
    tmp_path: Path, name: str, content: str, cores: float | None
) -> None:
    (tmp_path / name).write_text(content)
    assert cpu_quota(tmp_path) == cores
