"""The workflows of docs/how-to/ci.md and the check of schedulers.md do what they say, step by step."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train.py"
CI = (ROOT / "docs" / "how-to" / "ci.md").read_text(encoding="utf-8")
SCHEDULERS = (ROOT / "docs" / "how-to" / "schedulers.md").read_text(encoding="utf-8")
WORKFLOWS: list[dict[str, Any]] = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml workflow\n(.*?)^```", CI, re.MULTILINE | re.DOTALL)
]


def steps_of(workflow: dict[str, Any]) -> list[str]:
    if "jobs" in workflow:
        return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    return [line for job in workflow.values() for line in job["script"]]


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "GITHUB"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")])
    env = clean | {"OMP_NUM_THREADS": "1", "PATH": path, **variables}
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )


def test_there_is_a_workflow_for_github_and_one_for_gitlab() -> None:
    assert ["jobs" in workflow for workflow in WORKFLOWS] == [True, False]
    for workflow in WORKFLOWS:
        install, *rest = steps_of(workflow)
        assert install.startswith("pip install torch torch-healthcheck")
        assert all(step.startswith("healthcheck ") for step in rest)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2), ids=["github", "gitlab"])
def test_the_shell_steps_of_a_workflow_run(number: int, tmp_path: Path) -> None:
    """All but the installation, on a healthy script and on a broken one."""
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "healthcheck.yaml").write_text("version: 1\nextends: [healthcheck:recommended]\n")
    summary = tmp_path / "summary.md"
    variables = {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(tmp_path)} if number == 0 else {}
    steps = steps_of(WORKFLOWS[number])[1:]
    for step in steps:
        result = shell(step, tmp_path, **variables)
        assert result.returncode == 0, f"{step}\n{result.stdout}{result.stderr}"
    assert (tmp_path / "hc.xml").read_text().startswith("<?xml")
    assert (tmp_path / "healthcheck-runs" / "latest" / "report.json").is_file()
    broken = shell(steps[-1].replace("train.py", "--inject nan-grad@5 train.py"), tmp_path, **variables)
    assert broken.returncode == 1
    assert "<failure" in (tmp_path / "hc.xml").read_text()
    if number == 0:
        assert "\n::error " in broken.stderr
        assert "grads-not-finite" in summary.read_text()


def checks() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", SCHEDULERS, re.MULTILINE | re.DOTALL)
    return ["\n".join(line for line in block.splitlines() if "marker" in line) for block in blocks]


@pytest.mark.parametrize("number", range(4))
def test_the_two_line_check_ends_a_job_only_where_the_file_is(number: int, tmp_path: Path) -> None:
    check = checks()[number]
    assert len(check.splitlines()) == 2
    (tmp_path / "healthcheck-runs" / "latest").mkdir(parents=True)
    variables = {"HEALTHCHECK_RUNS": str(tmp_path / "healthcheck-runs")}
    assert shell(f"{check}\necho trains", tmp_path, **variables).stdout == "trains\n"
    (tmp_path / "healthcheck-runs" / "latest" / "DO-NOT-RESTART").write_text("three times\n")
    result = shell(f"{check}\necho trains", tmp_path, **variables)
    assert (result.returncode, result.stdout) == (0, "three times\n")
